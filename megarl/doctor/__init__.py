"""What this machine can run, what is missing, and what each missing part costs."""
