"""Reads ServiceTemplates from files for `plan` and `simulate`, and merges them as the operator does."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slipway_api.crd import service_template_crd
from slipway_api.inference_service import InferenceService
from slipway_api.service_template import BLOCKS, ServiceTemplate, own_blocks
from slipway_cli.traces import BadInputError, read_documents, spec_schema, unknown_fields
from slipway_operator.core.templates import StoredTemplate, TemplatesSeen, inherit


def read_templates(paths: Iterable[Path]) -> dict[str, StoredTemplate]:
    """The ServiceTemplates of the files by name; the last file with a name wins."""
    schema = spec_schema(service_template_crd())
    found = dict[str, StoredTemplate]()
    for path in paths:
        for document in read_documents(path):
            if document.get("kind") != ServiceTemplate.KIND:
                continue
            if unknown := next(unknown_fields(document.get("spec"), schema, "spec"), None):
                raise BadInputError(f"{path}: unknown field {unknown}; see kubectl explain svctpl.spec --recursive")
            found |= stored_templates([document])
    return found


def stored_templates(objects: Iterable[Mapping[str, Any]]) -> dict[str, StoredTemplate]:
    """ServiceTemplates as JSON, by name."""
    return {
        str(one["metadata"]["name"]): StoredTemplate(one.get("spec") or {}, one["metadata"].get("generation", 0))
        for one in objects
    }


def resolve_templates(
    service: InferenceService, templates: Mapping[str, StoredTemplate]
) -> tuple[InferenceService, dict[str, dict[str, Any]]]:
    """The service with its merged spec, and each block of it with its origin: `service`, a template, or `default`.

    Raises BadInputError for a template that is missing, and for a merged spec that breaks a rule.
    """
    merged, inheritance = inherit(service, TemplatesSeen(by_name=templates))
    if inheritance.fault:
        raise BadInputError(f"{service.metadata.name}: {inheritance.fault}")
    origins = {block: f"ServiceTemplate {one.name}" for one in inheritance.templates for block in one.blocks}
    origins |= dict.fromkeys(own_blocks(service.spec), "service")
    spec = merged.spec.to_json()
    return merged, {
        block: {"from": origins.get(block, "default"), "value": spec[block]} for block in BLOCKS if block in spec
    }
