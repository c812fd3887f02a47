"""--template chat: prompts in the tokenizer's chat template.

Some chat templates have switches: Qwen3's and SmolLM3's have enable_thinking. To set a switch,
write --template chat?enable_thinking=false.
"""

import functools
import json
import urllib.parse

from jinja2.meta import find_undeclared_variables

# transformers adds tags of its own to jinja. Only this private function knows them.
from transformers.utils.chat_template_utils import _compile_jinja_template

from nanoorz.ranks import UserError, one_line


def as_chat(text, tokenizer, cfg, system=""):
    """The text as a user's turn in the tokenizer's own chat template. Raises UserError.

    system: the text of the record's own system turn. --system replaces this text.
    """
    turns = [{"role": "user", "content": text}]
    if cfg.system is not None:
        system = cfg.system
    if system:
        turns = [{"role": "system", "content": system}, *turns]
    try:
        switches = find_switches(cfg.template, tokenizer.get_chat_template())
        prompt = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **switches
        )
        if text.strip() not in prompt:
            raise ValueError("its chat template leaves the question out")
        return prompt
    # A chat template is a program by the model's author. It may raise anything.
    except Exception as error:
        raise UserError(
            f"--template {cfg.template}: {cfg.model}: {one_line(error)}; give another --template"
        ) from error


@functools.cache
def find_switches(template_flag, chat_template) -> dict:
    """{switch: value} of --template chat?SWITCH=VALUE. Raises ValueError.

    chat_template: the tokenizer's, a program in the language of jinja.
    """
    query = template_flag.partition("?")[2]
    if not query:
        return {}
    switches = {}
    for name, text in urllib.parse.parse_qsl(query, strict_parsing=True, keep_blank_values=True):
        if name in switches:
            raise ValueError(f"its switch {name} is set twice")
        try:
            switches[name] = json.loads(text)
        except ValueError:
            # A word is a text without quotes. Python's False is refused, because a text is true.
            if not text.isidentifier() or text.lower() in ("true", "false", "none"):
                advice = "write true, false, a number or a word"
                raise ValueError(f"{name}={text} is no value; {advice}") from None
            switches[name] = text
    parsed = _compile_jinja_template(chat_template).environment.parse(chat_template)
    known = find_undeclared_variables(parsed) - {"messages", "add_generation_prompt"}
    unknown = ", ".join(switches.keys() - known)
    if unknown:
        raise ValueError(f"its chat template has no switch {unknown}; it reads {sorted(known)}")
    return switches
