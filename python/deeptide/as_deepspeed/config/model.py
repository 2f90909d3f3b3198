# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.config_utils: the base of sections that programs declare themselves, a model of pydantic's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from deeptide._process.log import say


class DeepSpeedConfigModel(BaseModel):
    """A section: unknown keys are errors, aliases and names both count, and values of "auto" are left out.

    A field with json_schema_extra={"deprecated": True} may name its successor as "new_param" ("section.key" of one
    within), a function of the value as "new_param_fn", a "deprecated_msg", and "set_new_param": False to leave that be.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{key: value for key, value in data.items() if strict or value != "auto"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._move(name, extra)

    def _move(self, name: str, extra: dict[str, Any]) -> None:
        """Gives a deprecated field's value to its successor. Errors: AssertionError if that was given too."""
        successor: str = extra.get("new_param", "")
        advice = f": use {successor}" if successor else ""
        say(f"{type(self).__name__}.{name} is deprecated{advice} {extra.get('deprecated_msg', '')}".rstrip(), "warning")
        if not successor or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda given: given)(getattr(self, name))
        delattr(self, name)
        *outer, last = successor.split(".")
        section: Any = self
        for part in outer:
            section = getattr(section, part)
        if last in section.model_fields_set:
            raise AssertionError(f"{type(self).__name__}: got {name} and {successor}, which replaces it: give one")
        setattr(section, last, value)
