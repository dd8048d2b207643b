"""Any rank of any layout, built in one process: groups without a network, tensors without memory."""

from megarl.policy.dry_run.groups import Place, check_groups, rank_place
from megarl.policy.dry_run.memory import MemoryCount
from megarl.policy.dry_run.rank import BuiltRank, build_rank
from megarl.policy.dry_run.tiling import check_tiling

__all__ = ["BuiltRank", "MemoryCount", "Place", "build_rank", "check_groups", "check_tiling", "rank_place"]
