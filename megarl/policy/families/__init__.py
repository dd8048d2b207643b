"""The model families that megarl trains, one small weight table each."""

from megarl.policy.families.llama import LLAMA
from megarl.policy.families.mistral import MISTRAL
from megarl.policy.families.qwen2 import QWEN2
from megarl.policy.families.qwen3 import QWEN3
from megarl.policy.families.table import REFUSED_EVERYWHERE, Family

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}

__all__ = ["FAMILIES", "REFUSED_EVERYWHERE", "Family"]
