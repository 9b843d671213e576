"""How a text model's conversations are written: by a template of the user, of the model, or by the Llama 3 form."""

from __future__ import annotations

from pathlib import Path

from kestrel.errors import CheckpointError, ConfigError
from kestrel.models.chat_files import ChatFiles
from kestrel.models.control_encoder import ControlEncoder
from kestrel.models.tokenizer import TextTokenizer
from kestrel.skills.chat_template import TemplateFault
from kestrel.skills.template_chat import TemplateChat

LLAMA_3_CONTROLS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def chat_format(
    files: ChatFiles, tokenizer: TextTokenizer, given: Path | None = None, tool_parser: str | None = None
) -> TemplateChat | None:
    """`given` is a template to take in place of the model's own, `tool_parser` the form of its calls. None: nothing
    says how conversations are written."""
    encoder = ControlEncoder(tokenizer)
    if given is not None:
        try:
            return TemplateChat(given.read_text(encoding="utf-8"), files.special_tokens, encoder, tool_parser)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                "chat_template", f"{given} cannot be read ({why}); give a file with a template"
            ) from error
        except TemplateFault as fault:
            raise ConfigError("chat_template", f"{given} is not a jinja template ({fault}); correct it") from fault
    if files.template is not None:
        try:
            return TemplateChat(files.template, files.special_tokens, encoder, tool_parser)
        except TemplateFault as fault:
            remedy = "give another one with --chat-template FILE"
            raise CheckpointError(f"{files.origin} is not a jinja template ({fault}); {remedy}") from fault
    if all(control in encoder.controls for control in LLAMA_3_CONTROLS):
        return TemplateChat(LLAMA_3, files.special_tokens, encoder, tool_parser)
    if tool_parser is not None:
        raise ConfigError("tool_parser", "needs a chat template; give one with --chat-template FILE, or leave it out")
    return None
