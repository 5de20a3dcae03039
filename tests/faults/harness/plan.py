"""What is asked of the system and what is done to it, drawn from a seed. Nothing here does anything.

The same seed gives the same requests and the same faults in the same order. A fault begins when a number of
requests has begun since the fault before it, so that a slow machine sees the same plan as a fast one; which
instant of a request it hits is up to the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

VERIFIES = ("verify-a", "verify-b")
DRAFTS = ("draft-a", "draft-b")
ORCHESTRATORS = ("orchestrator-a", "orchestrator-b")
PROCESSES = (*VERIFIES, *DRAFTS, *ORCHESTRATORS)
"""Each has a proxy before it: what happens to a connection happens to the one to this process."""
CLIENTS = "clients"
"""Who bursts in."""
FAULTS_AT_ONCE = 2
"""One process has one trouble at a time; two may have theirs together."""
LIAR = "liar"
"""A draft that lies; listed only for the time of a fault."""
SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.3},
)


class Manner(StrEnum):
    """How a client behaves."""

    READ = "read"
    """To the end, coming back with its tokens when it is cut off."""
    SLOW = "slow"
    """The same, with pauses: what it has not read waits in the services."""
    CANCEL = "cancel"
    """Cancels in the middle."""
    VANISH = "vanish"
    """Its connection is reset in the middle."""
    DISAPPEAR = "disappear"
    """Its network goes away without a word; only keepalive can tell."""
    HURRY = "hurry"
    """Has a deadline that it may not meet."""
    TURNS = "turns"
    """Keeps its session and goes on with it (greedy only)."""


class Kind(StrEnum):
    """What is done to a process or to the connections to it."""

    KILL = "kill"
    """SIGKILL, then start again."""
    TERMINATE = "terminate"
    """SIGTERM in the middle of work, then start again."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`."""
    CUT = "cut"
    """All connections to it are reset."""
    FREEZE = "freeze"
    """Nothing passes on its connections for `seconds`."""
    DELAY = "delay"
    """Every byte takes longer for `seconds`."""
    LEAVE = "leave"
    """It is not listed for `seconds`, though it works."""
    LIE = "lie"
    """A draft that lies is listed for `seconds`."""
    BURST = "burst"
    """Many requests at once."""
    CLOCK = "clock"
    """Its wall clock jumps by `seconds`."""


RESTARTS = (Kind.KILL, Kind.TERMINATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt with a sampler and a seed: its tokens are known from a run without faults."""

    number: int
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    number: int
    case: int
    tokens: int
    manner: Manner
    mode: str
    patience: int
    """Chunks before a client that leaves does so."""
    pause: float
    """Seconds: between chunks of a slow client, or the deadline of a hurried one."""
    attack: str
    """What a draft that lies does to it; its task label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing done to the system."""

    number: int
    kind: Kind
    target: str
    after: int
    """Requests that begin between the fault before and this one."""
    delay: float
    """Seconds from then on: faults hit requests at any point."""
    seconds: float

    def __str__(self) -> str:
        return f"#{self.number} {self.kind} {self.target} {self.seconds:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How often what happens."""

    manners: dict[Manner, int] = field(
        default_factory=lambda: {
            Manner.READ: 12, Manner.SLOW: 2, Manner.CANCEL: 2, Manner.VANISH: 2, Manner.HURRY: 1,
            Manner.TURNS: 2,
        }
    )  # fmt: skip
    kinds: dict[Kind, int] = field(
        default_factory=lambda: {
            Kind.KILL: 4, Kind.TERMINATE: 2, Kind.STOP: 3, Kind.CUT: 4, Kind.FREEZE: 3, Kind.DELAY: 2,
            Kind.LEAVE: 1, Kind.LIE: 2, Kind.BURST: 2, Kind.CLOCK: 2,
        }
    )  # fmt: skip
    longest: float = 4.0
    """Seconds of a fault that lasts."""
    spacing: int = 12
    """Requests between faults, in the mean."""
    spared: Sequence[str] = ()
    """Processes that are never killed, for memory to be watched over a long life."""


class Planner:
    """Draws an endless sequence of requests and one of faults; each depends on the seed alone."""

    def __init__(
        self, seed: int, mix: Mix, cases: Sequence[Case], tokens: int, attacks: Sequence[str]
    ) -> None:
        self.seed = seed
        self.mix = mix
        self.cases = cases
        self.tokens = tokens
        self.attacks = sorted(attacks)

    def asks(self) -> Iterator[Ask]:
        """Requests in the order in which they begin."""
        random = Random(f"asks {self.seed}")
        greedy = [case.number for case in self.cases if not case.sampling]
        number = 0
        while True:
            manner = _draw(random, self.mix.manners)
            yield Ask(
                number=number,
                case=random.choice(greedy) if manner is Manner.TURNS else random.randrange(len(self.cases)),
                tokens=random.choice((self.tokens, random.randint(2, self.tokens))),
                manner=manner,
                mode=random.choices(("AUTO", "SEQUENTIAL", "OFF"), (8, 1, 1))[0],
                patience=random.randint(0, 6),
                pause=random.uniform(0.02, 0.25),
                attack=random.choice(self.attacks),
            )
            number += 1

    def faults(self) -> Iterator[Fault]:
        """Faults in the order in which they begin."""
        random = Random(f"faults {self.seed}")
        number = 0
        recent: deque[str] = deque(maxlen=FAULTS_AT_ONCE)
        while True:
            targets: list[str] = []
            while not targets:
                kind = _draw(random, self.mix.kinds)
                spared = self.mix.spared if kind in RESTARTS else ()
                targets = [name for name in _targets(kind) if name not in (*spared, *recent)]
            jump = random.choice((-1, 1)) * random.choice((5.0, 3600.0, 86400.0))
            lasts = random.uniform(0.2, self.mix.longest)
            recent.append(random.choice(targets))
            yield Fault(
                number=number,
                kind=kind,
                target=recent[-1],
                after=random.randint(1, 2 * self.mix.spacing - 1),
                delay=random.uniform(0.0, 0.3),
                seconds=jump if kind is Kind.CLOCK else round(lasts, 3),
            )
            number += 1


def draw_cases(seed: int, count: int, prompts: Sequence[Sequence[int]]) -> list[Case]:
    """Every sampler in turn over the prompts; the first is greedy."""
    random = Random(f"cases {seed}")
    return [
        Case(
            number=number,
            prompt=tuple(random.choice(prompts)),
            sampling=SAMPLERS[number % len(SAMPLERS)],
            seed=random.randrange(2**32),
        )
        for number in range(count)
    ]


def _targets(kind: Kind) -> Sequence[str]:
    match kind:
        case Kind.LEAVE:
            return (*DRAFTS, *VERIFIES)
        case Kind.LIE:
            return (LIAR,)
        case Kind.BURST:
            return (CLIENTS,)
        case _:
            return PROCESSES


def _draw(random: Random, weights: dict[Any, int]) -> Any:
    return random.choices(list(weights), list(weights.values()))[0]
