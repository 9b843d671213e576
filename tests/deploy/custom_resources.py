"""Manifests of kinds that clusters learn from others: Gateway API, its inference extension, KServe, KubeRay.

`custom_resources.json` is what their published definitions say of the fields that the manifests use. A manifest with
another field is refused until

    python -m tests.deploy.custom_resources FILE…

has written it anew from the definitions: here those of gateway-api 1.6.1, gateway-api-inference-extension 1.6.0, kserve
0.20.0 and kuberay 1.7.0. Rules in CEL are left out, and `kubernetes-validate` judges pods.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

FILE = Path(__file__).with_name("custom_resources.json")
FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.31"
KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required")
POD_FIELDS = (
    "containers",
    "volumes",
    "securityContext",
    "terminationGracePeriodSeconds",
    "automountServiceAccountToken",
)


def require_valid(manifest: Mapping[str, Any]) -> None:
    """Raises where a published definition refuses the manifest, or does not know a field."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    schema = known.get(f"{manifest['apiVersion']} {manifest['kind']}")
    if schema is None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.validate(manifest, schema)
    for spec in pod_specs(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def pod_specs(value: Any) -> list[dict[str, Any]]:
    """Of everything that has containers, the fields that are a pod's."""
    if isinstance(value, list):
        return [spec for item in value for spec in pod_specs(item)]
    if not isinstance(value, dict):
        return []
    if "containers" in value:
        return [{name: value[name] for name in POD_FIELDS if name in value}]
    return [spec for item in value.values() for spec in pod_specs(item)]


# ---------------------------------------------------------------------- writing the file


def reduced(schema: Mapping[str, Any], uses: list[Any]) -> dict[str, Any]:
    """The part of a definition that is about the fields of `uses`."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {name: schema[name] for name in KEPT if name in schema}
    items = [item for use in uses if isinstance(use, list) for item in use]
    fields = [(name, value) for use in uses if isinstance(use, dict) for name, value in use.items()]
    if "items" in schema:
        kept["items"] = reduced(schema["items"], items)
    if "properties" in schema:
        kept["additionalProperties"] = False
        kept["properties"] = {
            name: {} if name in POD_FIELDS else reduced(of, [value for field, value in fields if field == name])
            for name, of in schema["properties"].items()
            if any(field == name for field, _ in fields)
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(schema["additionalProperties"], [value for _, value in fields])
    return kept


def main() -> None:
    files = sorted(FOLDER.rglob("*.yaml"))
    manifests = [manifest for path in files for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    known: dict[str, Any] = {}
    for name in sys.argv[1:]:
        spec = yaml.safe_load(Path(name).read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            of = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            uses = [one for one in manifests if (one.get("apiVersion"), one.get("kind")) == of]
            if uses:
                schema = reduced(version["schema"]["openAPIV3Schema"], uses)
                schema["properties"]["metadata"] = {"type": "object"}
                known[" ".join(of)] = schema
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
