#!/usr/bin/env bash
# Installs what judging programs needs from the system: bubblewrap and libseccomp. Debian and Ubuntu, as root or by sudo.
#
# Returns at once where both are there; where they cannot be installed it says so, and tests of the sandbox skip.
set -euo pipefail

say() { echo "install_sandbox: $*" >&2; }

has_libseccomp() { ldconfig -p 2>/dev/null | grep -q 'libseccomp\.so\.2' || ls /usr/lib/*/libseccomp.so.2 > /dev/null 2>&1; }

if command -v bwrap > /dev/null && has_libseccomp; then
    exit
fi
if ! command -v apt-get > /dev/null; then
    say "no apt-get here: install bubblewrap and libseccomp by this system's own means"
    exit
fi
as_root=()
if [[ $EUID -ne 0 ]]; then
    if ! sudo -n true 2> /dev/null; then
        say "not root: ask for 'apt-get install bubblewrap libseccomp2'"
        exit
    fi
    as_root=(sudo -n)
fi
"${as_root[@]}" apt-get update -qq || say "apt-get update failed; trying with the lists that are there"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap libseccomp2 > /dev/null \
    || say "bubblewrap could not be installed: the sandbox's tests will skip"
