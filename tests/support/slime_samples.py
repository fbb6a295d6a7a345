"""What slime's own RolloutManager and parser answer, for comparison. Runs in a worker of the tests' Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.buffer.trajectories.types import Batch
from headrace.policies.learners.slime.arguments import SlimeTerms


def both(batch: Batch, terms: SlimeTerms, layouts: list[dict[str, int]]) -> list[tuple[list[Any], list[Any]]]:
    """Return each rank's data by headrace and by slime, for each layout of ranks."""
    from headrace.policies.learners.config import row_limits
    from headrace.policies.learners.slime import batches, checkout
    from headrace.policies.learners.slime.arguments import parse

    slime, megatron = checkout.find_checkouts(terms.learner.slime)
    checkout.make_importable(slime, megatron)
    args = parse(terms, load=terms.learner.model_dir, slime=slime)
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training

    limits = row_limits(terms.learner)
    assert limits is not None
    found = []
    for layout in layouts:
        ours = batches.scheduled_data(batch, limits, terms.learner, args=args, parallel=layout)
        for data in ours:
            tensorize_rollout_data_for_training(data)
        found.append((ours, of_rollout_manager(batch, args, layout)))
    return found


def of_rollout_manager(batch: Batch, args: Any, layout: dict[str, int]) -> list[dict[str, Any]]:
    """Return each rank's data by the two methods of RolloutManager that make it from `Sample`s."""
    import ray
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    samples: list[Any] = []
    for rollout, item in enumerate(batch.items):
        for row in item.trajectory.rows:
            trained = row.loss_mask_T.tolist()
            prompt = trained.index(True)
            sample = Sample(
                index=len(samples),
                rollout_id=rollout,
                tokens=row.tokens_T.tolist(),
                response_length=len(trained) - prompt,
                loss_mask=[int(value) for value in trained[prompt:]],
                rollout_log_probs=row.logprobs_T[prompt:].tolist(),
                reward=item.advantage,
                status=Sample.Status.COMPLETED,
                metadata={"raw_reward": item.reward},
            )
            samples.append(sample)
    # The class without Ray; its constructor would start engines.
    manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.args, manager.train_parallel_config = args, layout
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
    return [ray.get(box.inner) for box in boxes]


def parsed_here(terms: SlimeTerms, names: Sequence[str]) -> list[Any]:
    """Return some of slime's arguments, parsed as the learner parses them."""
    from headrace.actors.training.slime_group import parse_here

    args = parse_here(terms, terms.learner.model_dir)
    return [getattr(args, name) for name in names]


def options_of_slime(terms: SlimeTerms) -> dict[str, dict[str, Any]]:
    """Return all flags of slime's parser: how many values each takes, of what type, and which are allowed."""
    from headrace.policies.learners.slime import arguments, checkout

    slime, megatron = checkout.find_checkouts(terms.learner.slime)
    checkout.make_importable(slime, megatron)
    load = terms.learner.model_dir
    words = arguments.command_line(terms, load=load, slime_root=slime.root)
    parser = arguments.run_parser(words, arguments.flags(terms, load=load), checkout="slime")[1]
    return {
        name: {
            "values": 1 if action.nargs is None else action.nargs,
            "type": getattr(action.type, "__name__", "str"),
            **({"choices": list(map(str, action.choices))} if action.choices else {}),
        }
        for action in parser._actions
        for name in action.option_strings
    }
