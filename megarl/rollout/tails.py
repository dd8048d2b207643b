"""Groups with responses that the cap on long tails cut: held over to the next step, or made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.data.samples import Prompt, Sample

Group = list[Sample]


@dataclass
class HeldOver:
    """Groups that wait for the rest of their cut responses; the next step's first round goes on with them."""

    keeps: bool  # else cut responses are dropped, and nothing is ever held
    groups: list[Group] = field(default_factory=list)

    def prompts(self) -> list[int]:
        """The index of each waiting group's prompt."""
        return [group[0].prompt.index for group in self.groups]

    def begin_anew(self, prompts: Sequence[Prompt], *, samples: int, temperature: float) -> None:
        """Nothing; groups of `samples` responses to these prompts wait, none of which has a token yet.

        A resumed run does so: what was cut before it stopped is generated again, so that no prompt is lost.
        """
        self.groups = [
            [Sample(prompt, 0, [], [], temperature, "abort", weight_version=-1) for _ in range(samples)]
            for prompt in prompts
        ]

    def take(self) -> list[Group]:
        """The waiting groups, which wait no longer."""
        groups, self.groups = self.groups, []
        return groups

    def whole(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that can be trained on now; those with cut responses are held, or lose these responses.

        A group that is left with fewer than two responses has nothing to compare and is dropped.
        """
        cut = [group for group in groups if any(is_cut(sample) for sample in group)]
        if self.keeps:
            self.groups += cut
            return [group for group in groups if not any(is_cut(sample) for sample in group)]
        left = [[sample for sample in group if not is_cut(sample)] for group in groups]
        return [group for group, before in zip(left, groups, strict=True) if len(group) >= min(2, len(before))]


def is_cut(sample: Sample) -> bool:
    """Whether the response was aborted before its end."""
    return sample.finish_reason == "abort"
