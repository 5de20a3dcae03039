"""Loads the target once and every draft after it, and measures texts, times and sizes. Imports torch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from outrider.cli.advise.chains import lookup_runs, runs
from outrider.cli.advise.findings import Size
from outrider.cli.advise.options import WITHOUT, DraftOption
from outrider.cli.prompt_ids import check_prompts
from outrider.cli.say import counter, say
from outrider.engine.runner import ModelRunner
from outrider.layer_lists import parse_layers
from simulator.measure import profile_of
from simulator.pair.draft_times import MeasuredDraft, measure_draft, measure_lookup
from simulator.pair.messages import measure_messages
from simulator.pair.models import ModelChoice, weight_bytes
from simulator.pair.ranks import rank_texts, without_guesses
from simulator.pair.steps import one_step
from simulator.pair.target_times import kv_tokens, measure_target, time_with_helper
from simulator.pair.texts import Text, write_texts
from simulator.profile import Profile
from simulator.traces import Corpus, compact

SPARE = 64
"""Tokens of context beyond the longest text: a simulated prompt begins with its session's number."""
NO_MODEL = Size(step_seconds=0.0, weight_bytes=0, kv_bytes_per_token=0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests that the target answers."""

    prompts: Sequence[tuple[int, ...]]
    tokens: int
    """New tokens after each prompt."""
    temperature: float

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its text."""
        return max(map(len, self.prompts)) + self.tokens

    @property
    def context(self) -> int:
        """Tokens before those of a step, on average."""
        return round(mean(map(len, self.prompts)) + self.tokens / 2)


@dataclass(frozen=True, slots=True)
class MeasuredOption:
    """A draft, or none: what the simulation and the report need of it."""

    option: DraftOption
    size: Size
    runs: tuple[tuple[int, ...], ...]
    profile: Profile
    corpus: Corpus


class TargetOnThisMachine:
    """The target, its texts and its times; drafts are compared with them one after the other."""

    def __init__(self, target: str, dtype: str, traffic: Traffic) -> None:
        """Load the target and measure it.

        Raises:
            ConfigError: the target cannot be loaded, or the prompts do not fit it.
        """
        self._name, self._dtype, self._traffic = target, dtype, traffic
        choice = ModelChoice(target, dtype)
        say("timing messages between processes")
        self._messages = measure_messages()
        say(f"loading and timing {target}")
        helped = time_with_helper(choice, traffic.context, traffic.longest)
        self._runner = self._load(target, choice)
        self.texts = self._write()
        say("timing the target's steps")
        self._times = measure_target(self._runner, helped, self.texts, traffic.context)
        times = self._times
        self.size = _size(self._runner, times.forward[0][1] + times.step + times.session)

    def without(self) -> MeasuredOption:
        """The option without drafts."""
        nothing = MeasuredDraft(((1, 0.0), (2, 0.0)), 0.0, 0.0, 0.0)
        traces = without_guesses(self.texts)
        return MeasuredOption(WITHOUT, NO_MODEL, (), self._profile(WITHOUT, nothing), compact(traces))

    def measure(self, option: DraftOption) -> MeasuredOption:
        """Load a draft, time it, and find which of its proposals for the texts are right.

        Raises:
            ConfigError: the draft cannot be loaded, or does not fit the target.
        """
        say(f"timing {option.name} on the target's texts")
        return self._measure_model(option) if option.is_model else self._measure_lookup(option)

    def _measure_model(self, option: DraftOption) -> MeasuredOption:
        skipped = parse_layers(option.skip_layers)
        choice = ModelChoice(option.draft, self._dtype, skipped, option.weights)
        draft = self._load(option.draft, choice)
        traces = rank_texts(draft, self.texts)
        times = measure_draft(draft, self.texts, self._target_step, self._traffic.context)
        size = _size(draft, times.forward[0][1] + times.step)
        right = tuple(runs([guess.rank == 0 for guess in trace.guesses]) for trace in traces)
        found = MeasuredOption(option, size, right, self._profile(option, times), compact(traces))
        del draft
        gc.collect()
        return found

    def _measure_lookup(self, option: DraftOption) -> MeasuredOption:
        times = measure_lookup(self.texts, self._target_step)
        size = Size(step_seconds=times.verdict, weight_bytes=0, kv_bytes_per_token=0)
        found = tuple(lookup_runs(text.prompt, text.tokens) for text in self.texts)
        traces = without_guesses(self.texts)
        return MeasuredOption(option, size, found, self._profile(option, times), compact(traces))

    def _load(self, model: str, choice: ModelChoice) -> ModelRunner:
        traffic = self._traffic
        runner = choice.load(kv_tokens(traffic.context, traffic.longest))
        size, limit = runner.loaded.vocabulary_size, runner.loaded.context_length
        check_prompts(traffic.prompts, traffic.tokens, model, size, limit)
        return runner

    def _write(self) -> list[Text]:
        traffic = self._traffic
        written = counter("the target writes its texts", len(traffic.prompts))
        ends = self._runner.loaded.eos_token_ids
        return write_texts(self._runner, traffic.prompts, traffic.temperature, traffic.tokens, ends, written)

    def _target_step(self) -> None:
        one_step(self._runner, self._traffic.context)

    def _profile(self, option: DraftOption, times: MeasuredDraft) -> Profile:
        return profile_of(
            option.name,
            f"{self._name} with {option.name}",
            "",
            self._times,
            times,
            self._messages,
            draft_kind="model" if option.is_model else "lookup",
            context_length=self._traffic.longest + SPARE,
        )


def _size(runner: ModelRunner, step_seconds: float) -> Size:
    return Size(
        step_seconds=step_seconds,
        weight_bytes=weight_bytes(runner),
        kv_bytes_per_token=runner.loaded.kv_bytes_per_token,
    )
