"""The large programs of an engine: which there are, and what each is called with."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled, Wrapped

from dflash_jax.decoding.automata import Automata
from dflash_jax.decoding.prompts import Prompts, stacked_on_host
from dflash_jax.decoding.state import DraftModel, RowSettings, State
from dflash_jax.infer.engine import executables
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiler_options import Options, fastest_options
from dflash_jax.infer.engine.compiling import Work
from dflash_jax.infer.engine.constraints import Constraints
from dflash_jax.infer.engine.drafts import Drafts
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.executables import Call
from dflash_jax.infer.engine.graphs import graph_options
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.programs import decode_call, prefill
from dflash_jax.infer.engine.prompts import BesideShape, PrefillBatch, Prefills, PrefillShape
from dflash_jax.infer.engine.reads import ReadPlan
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.widths import filled, narrower
from dflash_jax.mesh import rows_of
from dflash_jax.sharding import settled
from dflash_jax.target import Target


class Decode(NamedTuple):
    """The name of a program that decodes.

    Attributes:
        rows: that it advances.
        reads: whether each of its steps reads prompts, too; it then advances all rows.
    """

    draft: Draft
    rows: int
    reads: bool = False


Name = PrefillShape | Decode


class Beside(NamedTuple):
    """What the steps of a visit read of prompts.

    Attributes:
        plans: of each step.
        prompts: that they read, by slot.
    """

    plans: Sequence[ReadPlan]
    prompts: Mapping[int, ActiveRequest]


class Calls:
    """The programs for these models.

    Args:
        rows: of the state that they change.
        constraints: those that rows may have; None is none.

    Attributes:
        target: whose programs they are.
        parts: of the mesh that rows are split over.
        prefills: those that read prompts alone.
        beside: the shape of what a step reads of prompts beside rows that decode; None where none does.
        neutral: settings of a row that is idle.
    """

    def __init__(
        self, target: Target, config: EngineConfig, drafts: Drafts, rows: int, constraints: Constraints | None
    ):
        if target.mesh is None:
            target, drafts.drafter = settled((target, drafts.drafter))
        self.target, self._config, self._drafts, self._rows = target, config, drafts, rows
        self._constraints, free = constraints, constraints and constraints.place(None)
        self.parts, fixed = rows_of(target.mesh), config.deterministic
        self.prefills = Prefills(config.prefill_chunk, rows, self.parts, fixed)
        self.neutral = SamplingParams().on_device("", 0, 0, 1)._replace(walk=free)
        self._widths = (rows,) if fixed else narrower(rows, self.parts)
        tokens = config.beside(jax.default_backend())
        self.beside = None if tokens is None else BesideShape.of(tokens, rows, self.parts, config.prefill_chunk)
        self._executables: dict[Name, Compiled] = {}  # those that are kept on disk

    @property
    def drafter(self) -> DraftModel | None:
        return self._drafts.drafter

    @property
    def names(self) -> list[Name]:
        """All programs."""
        alone = [Decode(draft, rows) for rows in self._widths for draft in self._drafts.programs_of(rows)]
        reading = [Decode(draft, self._rows, True) for draft in self._drafts.programs_of(self._rows)]
        return [*alone, *self.prefills.shapes, *(reading if self.beside else ())]

    @property
    def first(self) -> list[Name]:
        """Those with which every request can be answered; all, where nothing may depend on how far compiling is."""
        if self._config.deterministic:
            return self.names
        return [*(Decode(draft, self._rows) for draft in self._drafts.first), self.prefills.first]

    def idle(self, width: int) -> list[int]:
        """Rows of a program of that width, whichever."""
        return filled(self._rows, [[]] * self.parts, width)

    def nothing(self, shape: PrefillShape) -> tuple[PrefillBatch, tuple[RowSettings, ...]]:
        """The arguments of a program that reads nothing."""
        selected = self.prefills.batch(shape)
        return selected, (self.neutral,) * len(selected.rows)

    def empty(self, name: Name, state: State) -> Call:
        """The program of this name with arguments for which it does nothing."""
        if isinstance(name, PrefillShape):
            return self.prefill(state, *self.nothing(name))
        return self.decode(state, name.draft, 0, 0, self.idle(name.rows), Beside([], {}) if name.reads else None)

    def is_on_disk(self, name: Name, state: State) -> bool:
        """Whether `work` needs to trace nothing."""
        path = executables.path_of(self.empty(name, state), self._options(name))
        return path is not None and path.exists()

    def work(self, name: Name, current: Callable[[], State]) -> Work:
        """The work after which this program can be called: to read it from disk, or to compile it.

        Args:
            current: gives the state as it is.
        """
        if name in self._executables:
            return lambda: None
        call, options = self.empty(name, current()), self._options(name)
        if (path := executables.path_of(call, options)) is None:
            lowered = call.program.lower(*call.arguments)

            def compile() -> None:  # jax finds it when it is called
                lowered.compile()

            return compile

        def use(program: Compiled | None) -> Callable[[], Work] | None:
            if program is None:
                return partial(compiling, fresh=True)
            self._executables[name] = program
            return None

        def compiling(*, fresh: bool) -> Work:
            lowered = executables.lower(path, self.empty(name, current()), options, fresh=fresh)
            return lambda: use(executables.compiled(path, lowered, fresh=fresh))

        if path.exists():
            return lambda: use(executables.load(path, call))
        return compiling(fresh=False)

    def _options(self, name: Name) -> Options | None:
        return None if isinstance(name, PrefillShape) else self.compiler_options(name.draft, name.rows)

    def asked(self, name: Name, call: Call) -> tuple[Wrapped | Compiled, tuple]:
        """The program of this name and its arguments."""
        read = self._executables.get(name)
        return (call.program, call.arguments) if read is None else (read, call.given)

    def prefill(self, state: State, selected: PrefillBatch, settings: tuple[RowSettings, ...]) -> Call:
        given = self.target, self.drafter, state, *selected, settings, self._automata
        return Call(prefill, (*given, self._config.logprobs, self._config.sampled_logprobs), 2)

    def decode(
        self,
        state: State,
        draft: Draft,
        max_steps: int,
        leave_below: int,
        slots: Sequence[int],
        beside: Beside | None = None,
    ) -> Call:
        rows = None if len(slots) == self._rows else np.asarray(slots, np.int32)
        how = max_steps, leave_below, draft, self._config, rows, self.compiler_options(draft, len(slots))
        given = None if beside is None else self._prompts(beside)
        return Call(*decode_call(self.target, self.drafter, state, *how, self._automata, given), 5)

    def _prompts(self, beside: Beside) -> Prompts:
        """What the steps of a visit read, as its program is given it."""
        assert self.beside is not None
        steps, (nothing, neutral) = self._config.steps_per_visit, self.nothing(self.beside.block)
        batches = [*(plan.batch for plan in beside.plans), *[nothing] * (steps - len(beside.plans))]
        settings = [[*neutral] for _ in range(steps)]
        for of_step, plan in zip(settings, beside.plans, strict=False):
            for read in plan.reads:
                assert read.place is not None
                of_step[read.place] = beside.prompts[read.slot].settings
        of_steps = PrefillBatch(*map(np.stack, zip(*batches, strict=True)))
        return Prompts(**of_steps._asdict(), settings=stacked_on_host(settings), total=self.beside.total)

    @property
    def _automata(self) -> Automata | None:
        return self._constraints and self._constraints.tables

    def compiler_options(self, draft: Draft, rows: int) -> Options | None:
        """The compiler's options for the program with this draft, if there are any."""
        mesh = self.target.mesh
        options = dict(graph_options(self._config.gpu_graphs, 1 if mesh is None else mesh.size))
        if self.drafter is not None and draft.block_size:
            config, block = self.target.config, self._drafts.positions(draft)
            inner = max(layer.intermediate_size for layer in config.layers)
            clock = not self._config.deterministic
            options |= fastest_options(config.hidden_size, inner, rows * block, clock=clock) or {}
        return options or None
