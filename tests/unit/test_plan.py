"""`megarl plan`: the arithmetic by hand, what is refused, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import RunConfig, load_config
from megarl.errors import UserError
from megarl.plan.activations import micro_batches_in_flight
from megarl.plan.batches import batches_of
from megarl.plan.gpus import GPUS, Assumptions
from megarl.plan.layout import Cluster, Plan, plan_layout
from megarl.plan.memory import states_of
from megarl.plan.model_folder import shape_folder
from megarl.plan.parameters import Parameter, buffer_of
from megarl.plan.proposals import proposals
from megarl.plan.serving import cache_bytes_per_token, memory_share, server_weights
from megarl.plan.speed import forward_flops, pipeline_bubble
from megarl.policy.model import ModelShape, read_model_shape
from megarl.policy.parallel import ParallelConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL, LARGE = EXAMPLES / "qwen2.5_7b" / "kl_cov.yaml", EXAMPLES / "qwen2.5_32b" / "kl_cov.yaml"


def loaded(path: Path, *overrides: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(path, overrides, RunConfig)
    return config, read_model_shape(shape_folder(path, config.model.path))


def cluster(gpus: int, gpu: str = "h100-80gb", **changed: Any) -> Cluster:
    settings = {"gpus_per_node": 8, "mean_response": 2048, "rounds": 1.0, "assumptions": Assumptions()}
    return Cluster(gpu=GPUS[gpu], gpus=gpus, **(settings | changed))


def planned(path: Path, gpus: int, *overrides: str, **changed: Any) -> Plan:
    return plan_layout(*loaded(path, *overrides), cluster(gpus, **changed))


def test_the_papers_batch() -> None:
    """256 prompts x 8 samples, 8 updates: 256 sequences an update (section 4.3)."""
    batches = batches_of(*loaded(LARGE), data=4, mean_response=2048)
    assert (batches.responses, batches.updates, batches.sequences_per_update) == (2048, 8, (256, 256))
    assert batches.groups_per_update == (32, 32) and batches.sequences_per_rank == 64
    assert batches.longest == 10240 and batches.micro_batches_longest == 32  # two of the longest in 20,480 tokens
    assert batches.micro_batches_mean == 8  # eight of 256 + 2,048 tokens
    # KL-Cov scores the rollout once and 7 of its 8 mini-batches again, GRPO the rollout alone.
    assert batches.score_passes == 1 + 7 / 8
    assert batches_of(*loaded(LARGE.with_name("grpo.yaml")), data=4, mean_response=2048).score_passes == 1


def test_groups_that_do_not_divide_are_shared_as_evenly_as_can_be() -> None:
    config, shape = loaded(SMALL, "loop.prompts_per_step=10", "loop.updates_per_step=4")
    batches = batches_of(config, shape, data=2, mean_response=100)
    assert batches.groups_per_update == (2, 3) and batches.sequences_per_update == (16, 24)
    assert batches.sequences_per_rank == 12


def test_qwen_7b_on_tensor_4_data_2_by_hand() -> None:
    """h 3584, f 18944, 28 layers, 28 heads and 4 key-value heads of 128, 152,064 tokens."""
    layer = (3584 * 3584 * 2 + 2 * 512 * 3584 + 3584 + 2 * 512 + 3 * 3584 * 18944) // 4 + 2 * 3584
    elements = 28 * layer + 3584 + 2 * 152064 // 4 * 3584
    states = states_of(*loaded(SMALL), 2, 0)
    assert states.parameters == elements == 1_904_057_344
    assert states.weights == 2 * elements and states.gradients == 4 * elements  # all sizes are multiples of 128 here
    assert states.master_weights == 2 * elements and states.moments == 4 * elements


def test_buffers_are_padded_as_megatrons_distributed_optimizer_does() -> None:
    parameters = [Parameter("a", 100), Parameter("b", 30), Parameter("shared", 65, own_bucket=True)]
    buffer = buffer_of(parameters, replicas=3, distributed=True)
    # From the end: `shared` alone in a bucket that ends at lcm(3, 128) = 384; then b at 384 and a at 448.
    assert buffer.ranges == ((0, 65, 0), (384, 414, 1), (448, 548, 1))
    assert buffer.buckets == ((0, 384), (384, 768)) and buffer.size == 768
    assert [buffer.shard(rank, 3) for rank in range(3)] == [65 + 30 + 64, 36, 0]
    plain = buffer_of(parameters, replicas=3, distributed=False)
    assert plain.size == 195 and plain.buckets == ((0, 195),)


def test_servers_by_hand() -> None:
    _, shape = loaded(LARGE)
    assert server_weights(shape, 4, 2) == 32_763_876_352 * 2 // 4
    assert cache_bytes_per_token(shape, 4, 2) == 2 * 64 * 2 * 128 * 2  # two of eight key-value heads on each GPU
    assert cache_bytes_per_token(shape, 16, 2) == 2 * 64 * 1 * 128 * 2  # more GPUs than heads copy them
    serving = planned(LARGE, 32).chosen.serving
    assert serving is not None and serving.servers == 8 and serving.share == 0.65
    assert serving.cache == int(0.65 * serving.free_at_start) - serving.weights
    assert serving.cache_tokens == serving.cache // serving.bytes_per_token
    assert memory_share(["--mem-fraction-static=0.5"]) == 0.5 and memory_share(["--x"]) == 0.85
    with pytest.raises(UserError, match="must be between 0 and 1"):
        memory_share(["--mem-fraction-static", "1.5"])


def test_operations_and_bubble_by_hand() -> None:
    _, shape = loaded(SMALL)
    matrices = 7_615_616_512 - 152064 * 3584
    assert forward_flops(shape, 2000) == 2 * matrices + 4 * 28 * 128 * 28 * 1000
    config, _ = loaded(SMALL, "parallel.pipeline=4", "parallel.virtual_pipeline=2")
    assert pipeline_bubble(config, 8) == 1 + 3 / 16
    assert [micro_batches_in_flight(ParallelConfig(pipeline=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert micro_batches_in_flight(ParallelConfig(pipeline=4, virtual_pipeline=2), 0) == 4 * (1 + 3 / 8)


def test_a_step_is_bound_by_what_takes_longest() -> None:
    short = planned(SMALL, 8, mean_response=64).time
    assert short.bound.startswith("generation: the longest response")
    assert planned(SMALL, 8, mean_response=2048).time.bound == "updates: matrix products of the policy"
    long = planned(SMALL, 8, mean_response=8000).time
    assert long.seconds > short.seconds and long.bound == "generation: memory bandwidth of decoding"
    assert long.sync_bytes == 2 * 7_615_616_512
    assert planned(SMALL, 8, gpu="h200-141gb").time.seconds < planned(SMALL, 8).time.seconds


@pytest.mark.parametrize(
    ("path", "gpus", "overrides", "message"),
    [
        (SMALL, 8, ["parallel.tensor=8"], "parallel.tensor = 8 does not divide the model's 28 attention heads"),
        (SMALL, 8, ["precision.layers=local", "parallel.context=2"], "parallel.context = 2 needs Transformer Engine"),
        (SMALL, 6, [], "does not divide the world size 6"),
        (SMALL, 8, ["parallel.pipeline=3"], "does not divide"),
        (SMALL, 8, ["parallel.tensor=1", "parallel.sequence=false"], "GB a GPU"),
        (LARGE, 8, [], "h100-80gb has 80"),
        (LARGE, 32, ["rollout.server_tensor=1"], "room for 0 tokens, one response needs 10240"),
        (LARGE, 32, ["rollout.server_tensor=3"], "does not divide the model's 40 attention heads"),
        (LARGE, 32, ["rollout.server_tensor=10"], "1 x 10: a node has 8 GPUs that train"),
        (SMALL, 8, ["rollout.servers=5"], "5 x 2: a node has 8 GPUs that train"),
        (SMALL, 8, ["data.max_prompt_length=200000"], "exceeds the 131070 positions"),
        (SMALL, 8, ["rollout.placement=separate"], "a plan needs rollout.servers"),
        (SMALL, 8, ["rollout.placement=separate", "rollout.servers=4"], "leaves no GPU of 8 to train on"),
        (SMALL, 8, ["loop.prompts_per_step=8", "rollout.samples_per_prompt=1"], "some would have none"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(path: Path, gpus: int, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        planned(path, gpus, *overrides)
    assert message in str(refused.value)


def test_a_layer_does_not_spread_over_nodes() -> None:
    with pytest.raises(UserError, match="spreads each layer over nodes of 4 GPUs"):
        planned(LARGE, 32, gpus_per_node=4)


def test_a_layer_does_not_spread_over_nodes_of_which_servers_have_a_part() -> None:
    """Of 2 x 6 GPUs that train, the second four would be two of one node and two of the other."""
    separate = ["rollout.placement=separate", "rollout.servers=1", "rollout.server_tensor=2"]
    with pytest.raises(UserError, match="spreads each layer over nodes of 6 GPUs that train"):
        planned(LARGE, 16, *separate, "parallel.tensor=4", "parallel.pipeline=1", gpu="h200-141gb")


def test_as_many_colocated_servers_as_the_start_makes() -> None:
    serving = planned(SMALL, 16, "rollout.servers=2").chosen.serving
    assert serving is not None and serving.servers == 4  # two of each node
    serving = planned(SMALL, 16, "rollout.server_tensor=7").chosen.serving
    assert serving is not None and serving.servers == 2  # one of each node leaves a GPU without


def test_separate_servers_have_gpus_of_their_own() -> None:
    plan = planned(SMALL, 8, "rollout.placement=separate", "rollout.servers=2")
    assert plan.training_gpus == 4 and plan.data == 1
    assert plan.chosen.name == "separate" and plan.chosen.serving is not None
    assert plan.chosen.serving.servers == 2 and plan.chosen.server == plan.chosen.serving.total
    assert plan.chosen.generating == max(stage.scoring for stage in plan.training) + Assumptions().overhead


def test_proposals_fit_and_the_best_comes_first() -> None:
    config, shape = loaded(LARGE)
    found = proposals(config, shape, cluster(32))
    fitting = [proposal for proposal in found if proposal.plan is not None]
    assert fitting and found[: len(fitting)] == fitting
    assert all(proposal.plan is not None and proposal.plan.margin >= 0 for proposal in fitting)
    assert all(p.tensor * p.pipeline * p.context * p.data == 32 for p in fitting)
    assert all(proposal.refused for proposal in found[len(fitting) :])
    assert any("h100-80gb has 80" in proposal.refused for proposal in found)


def test_the_command_prints_what_the_functions_say(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(SMALL), "--gpus", "8", "--mean-response", "1700", "--json"])
    printed = capsys.readouterr().out
    record = json.loads(printed)
    plan = planned(SMALL, 8, mean_response=1700)
    assert printed.count("\n") == 1 and record["fits"] and record["plan"]["margin"] == plan.margin
    assert record["plan"]["training"][0]["states"]["optimizer"] == plan.training[0].states.optimizer
    main(["plan", str(SMALL), "--gpus", "8", "loop.steps=3"])
    printed = capsys.readouterr().out
    assert "8 updates of 256 sequences (32 groups), 128 on a data rank" in printed
    assert "GB are left" in printed and "assumed: 40% of the operations" in printed
    assert "layouts that fit, fastest first" in printed and "does not divide the model's 28 attention heads" in printed


def test_a_config_that_does_not_fit_ends_with_its_reason_and_proposals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(LARGE), "--gpus", "8"])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.err.count("\n") == 1
    assert "does not run on 8 h100-80gb" in captured.err and "do not:" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8", "--gpu", "v100"], "--gpu v100 is not known; allowed: h100-80gb"),
        (["--gpus", "0"], "--gpus = 0 must be positive"),
        (["--gpus", "12"], "--gpus = 12 is no multiple of --gpus-per-node = 8"),
        (["--gpus", "8", "--mean-response", "0"], "--mean-response = 0 must be positive"),
        (["--gpus", "8", "--generation-rounds", "nan"], "--generation-rounds = nan must be positive"),
        (["--gpus", "8", "--generation-rounds", "inf"], "--generation-rounds = inf must be positive"),
        (["model.path=nowhere/x", "--gpus", "8"], "no config.json in"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(SMALL), *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
