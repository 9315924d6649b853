"""How our shapes travel through Temporal: as the same JSON that `model.codec` writes and reads.

The SDK's own pydantic converter writes a value without looking at its type's schema, so that a `NodeId` would become
a mapping of its fields, which no reader of v1 takes. Every client, worker and replayer of ours uses `DATA_CONVERTER`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
)

from model.codec import adapter, faults_of, to_json
from model.errors import ModelError
from model.shape import Shape


class ShapePayloadConverter(PydanticJSONPlainPayloadConverter):
    """Writes and reads our shapes by `model.codec`, anything else as pydantic does."""

    def to_payload(self, value: Any) -> Payload | None:
        """Writes one value."""
        if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return Payload(metadata={"encoding": self.encoding.encode()}, data=to_json(value))
        return super().to_payload(value)

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        """Reads one value.

        A field that is not known is left out: the other side may be of a newer build, and what is in a history may be
        of an older one. Workers of both go on while a fleet is upgraded.

        Raises:
            ModelError: it is not of the shape `type_hint`; the error names every fault.
        """
        if isinstance(type_hint, type) and issubclass(type_hint, Shape):
            try:
                return adapter(type_hint).validate_json(payload.data, strict=True, extra="ignore")
            except ValidationError as error:
                raise ModelError.of_faults(type_hint.__name__, faults_of(error), code="model.invalid") from None
        return super().from_payload(payload, type_hint)


class PayloadConverter(CompositePayloadConverter):
    """The default converters, with ours for JSON."""

    def __init__(self) -> None:
        ours = ShapePayloadConverter()
        super().__init__(
            *(
                ours if isinstance(converter, JSONPlainPayloadConverter) else converter
                for converter in DefaultPayloadConverter.default_encoding_payload_converters
            )
        )


DATA_CONVERTER = DataConverter(payload_converter_class=PayloadConverter)
