"""What things are called: tenant, job, node, device, checkpoint, epoch, step and event.

Each is written as a short string or an integer in JSON, and refuses to exist in an invalid form. A structured
id (node, device, event) has `parse`, and `str` writes what `parse` reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from model.errors import ModelError

# Lower-case labels as in host names: they go into paths, topics, workflow ids and Kubernetes labels unchanged.
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# A name that a node reports; host names have dots.
_HOST = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_NODE = rf"{_HOST}@[1-9][0-9]*"
# A run of the first execution of a workflow, as the workflow engine writes it.
_RUN = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,98}[A-Za-z0-9])?"
_COUNTER_END = 1 << 63
_SHOWN = 80  # characters of what is no id


class _TextId(str):
    """A string of one pattern. Subclasses say what it is called and what is allowed."""

    __slots__ = ()
    _noun: ClassVar[str]
    _code: ClassVar[str]
    _pattern: ClassVar[re.Pattern[str]]
    _rule: ClassVar[str]

    def __new__(cls, value: str) -> Self:
        if not cls._pattern.fullmatch(value):
            shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
            raise ModelError(
                f"{shown!r} is not the id of a {cls._noun}.",
                code=f"model.{cls._code}",
                remedy=f"Use {cls._rule}.",
            )
        return super().__new__(cls, value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{cls._pattern.pattern}$"}


class TenantId(_TextId):
    """Who a job belongs to: quotas, keys of stored chunks and bills are kept by tenant."""

    __slots__ = ()
    _noun, _code = "tenant", "tenant-id"
    _pattern = re.compile(_LABEL)
    _rule = "1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends"


class JobId(_TextId):
    """One job for life, over all its epochs. It is also the id of the job's workflow."""

    __slots__ = ()
    _noun, _code = "job", "job-id"
    _pattern = re.compile(_LABEL)
    _rule = TenantId._rule


class CheckpointId(_TextId):
    """A checkpoint: ``ck-`` and the first 40 hexadecimal digits of the blake3 of its manifest."""

    __slots__ = ()
    _noun, _code = "checkpoint", "checkpoint-id"
    _pattern = re.compile(r"ck-[0-9a-f]{40}")
    _rule = "ck- and the 40 hexadecimal digits that name its manifest"


class _Counter(int):
    """A number that only grows. It stays below 2**63, so that every language reads it."""

    __slots__ = ()
    _noun: ClassVar[str]
    _code: ClassVar[str]

    def __new__(cls, value: int) -> Self:
        if not 0 <= value < _COUNTER_END:
            raise ModelError(
                f"{value} is not {cls._noun}.", code=f"model.{cls._code}", remedy="Use an integer from 0 to 2**63 - 1."
            )
        return super().__new__(cls, value)

    @property
    def next(self) -> Self:
        """The one after this."""
        return type(self)(self + 1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads plain decimal digits.

        Raises:
            ModelError: `text` is anything else, signs and underscores included.
        """
        if not re.fullmatch(r"0|[1-9][0-9]*", text):
            raise ModelError(
                f"{text!r} is not {cls._noun}.", code=f"model.{cls._code}", remedy="Write it in decimal digits."
            )
        return cls(int(text))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls, core_schema.int_schema(ge=0, lt=_COUNTER_END, strict=True)
        )


class Epoch(_Counter):
    """A job's placement generation; it fences all earlier ones. 0 is before the first placement."""

    __slots__ = ()
    _noun, _code = "an epoch", "epoch"


class Step(_Counter):
    """How many steps of optimizers a rank has done, those of all its optimizers together: mostly one a mini-batch."""

    __slots__ = ()
    _noun, _code = "a step", "step"


class Generation(_Counter):
    """Sets the events of a job's workflow after a reset apart from those before it."""

    __slots__ = ()
    _noun, _code = "a generation", "generation"


class Sequence(_Counter):
    """The place of an event among those of its generation."""

    __slots__ = ()
    _noun, _code = "a sequence number", "sequence"


class _ParsedId:
    """A structured id that is a string in JSON."""

    __slots__ = ()
    _schema: ClassVar[str]

    @classmethod
    def parse(cls, text: str) -> Self:
        raise NotImplementedError

    @classmethod
    def _from(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise ValueError("it must be a string")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._from, serialization=core_schema.to_string_ser_schema())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{cls._schema}$"}


@dataclass(frozen=True, slots=True, order=True)
class NodeId(_ParsedId):
    """A node between two of its starts, written ``name@incarnation``.

    Attributes:
        name: what the node is called, e.g. its host name.
        incarnation: how often it has registered, from 1: what an earlier incarnation held is gone.
    """

    name: str
    incarnation: int

    _schema: ClassVar[str] = _NODE

    def __post_init__(self) -> None:
        if not re.fullmatch(_HOST, self.name) or not 1 <= self.incarnation < _COUNTER_END:
            raise ModelError(
                f"'{self.name}@{self.incarnation}' is not the id of a node.",
                code="model.node-id",
                remedy="Use name@incarnation, e.g. node-7@1: a lower-case host name and a number from 1.",
            )

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``name@incarnation``; raises `ModelError` for anything else."""
        if not re.fullmatch(cls._schema, text):
            raise ModelError(
                f"{text!r} is not the id of a node.",
                code="model.node-id",
                remedy="Use name@incarnation, e.g. node-7@1.",
            )
        name, _, incarnation = text.rpartition("@")
        return cls(name, int(incarnation))


@dataclass(frozen=True, slots=True, order=True)
class DeviceId(_ParsedId):
    """An accelerator of a node, or a part of one, written ``name@incarnation/device[/part]``.

    Attributes:
        node: where it is.
        path: names from the whole device down to this part, e.g. ``("gpu-3", "mig-1")``.
    """

    node: NodeId
    path: tuple[str, ...]

    _schema: ClassVar[str] = rf"{_NODE}(?:/{_LABEL}){{1,4}}"

    def __post_init__(self) -> None:
        if not 1 <= len(self.path) <= 4 or not all(re.fullmatch(_LABEL, part) for part in self.path):
            raise ModelError(
                f"'{self.node}/{'/'.join(self.path)}' is not the id of a device.",
                code="model.device-id",
                remedy="Use node/device or node/device/part, e.g. node-7@1/gpu-0/mig-1, in lower case.",
            )

    def __str__(self) -> str:
        return "/".join((str(self.node), *self.path))

    @property
    def parent(self) -> DeviceId | None:
        """The device that this is a part of; None for a whole one."""
        return DeviceId(self.node, self.path[:-1]) if len(self.path) > 1 else None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``name@incarnation/device[/part]``; raises `ModelError` for anything else."""
        if not re.fullmatch(cls._schema, text):
            raise ModelError(
                f"{text!r} is not the id of a device.",
                code="model.device-id",
                remedy="Use node/device or node/device/part, e.g. node-7@1/gpu-0.",
            )
        node, *path = text.split("/")
        return cls(NodeId.parse(node), tuple(path))


@dataclass(frozen=True, slots=True)
class EventId(_ParsedId):
    """One event of a job, written ``job/first_execution_run/generation/seq``; consumers deduplicate by it.

    Attributes:
        job: whose event it is.
        first_execution_run: the run id of the workflow's first execution: the same over continue-as-new, another
            when a job's id is used again.
        generation: taken from a compare-and-swap record, so that a reset workflow does not reuse ids.
        seq: from 1, without gaps, within the generation.
    """

    job: JobId
    first_execution_run: str
    generation: Generation
    seq: Sequence

    _schema: ClassVar[str] = rf"{_LABEL}/{_RUN}/(?:0|[1-9][0-9]*)/[1-9][0-9]*"

    def __post_init__(self) -> None:
        if not re.fullmatch(self._schema, str(self)):
            raise ModelError(
                f"'{self}' is not the id of an event.",
                code="model.event-id",
                remedy="Use job/first_execution_run/generation/seq, with seq from 1.",
            )

    def __str__(self) -> str:
        return f"{self.job}/{self.first_execution_run}/{int(self.generation)}/{int(self.seq)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``job/first_execution_run/generation/seq``; raises `ModelError` for anything else."""
        if not re.fullmatch(cls._schema, text):
            raise ModelError(
                f"{text!r} is not the id of an event.",
                code="model.event-id",
                remedy="Use job/first_execution_run/generation/seq, e.g. char-gpt/0198c0de/0/1.",
            )
        job, run, generation, seq = text.split("/")
        return cls(JobId(job), run, Generation.parse(generation), Sequence.parse(seq))
