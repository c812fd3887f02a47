"""--template chat: prompts in the tokenizer's chat template.

Some chat templates have switches: Qwen3's and SmolLM3's have enable_thinking. To set a switch,
write --template chat?enable_thinking=false.

Some templates have today's date, by a function `strftime_now`, such as those of Llama 3 and
SmolLM3. A run keeps the day of its start, as --template chat?strftime_now=2026-11-27 in its
config.json. So a resume on another day has the same prompts.
"""

import datetime
import functools
import json
import re
import urllib.parse
from pathlib import Path

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

# transformers adds tags of its own to jinja. Only this private function knows them.
from transformers.utils.chat_template_utils import _compile_jinja_template

from nanoorz.ranks import UserError, one_line

DATE = "strftime_now"


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
        switches = dict(find_switches(cfg.template, tokenizer.get_chat_template()))
        if DATE in switches:
            switches[DATE] = datetime.date.fromisoformat(switches[DATE]).strftime
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


def fix_date(cfg, tokenizer) -> str:
    """--template with the day of the run, if the chat template has a date that is not set."""
    try:
        has_date = DATE in variables_of(tokenizer.get_chat_template())
        is_set = DATE in find_switches(cfg.template, tokenizer.get_chat_template())
    except Exception:
        return cfg.template  # as_chat says what is wrong.
    if not has_date or is_set:
        return cfg.template
    begin = cfg.template.rstrip("?&")
    begin += f"{'&' if '?' in begin else '?'}{DATE}="
    if cfg.resume != "none":
        try:
            known = json.loads((Path(cfg.run_dir) / "config.json").read_text())["template"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            known = ""
        if re.fullmatch(re.escape(begin) + "[0-9-]{10}", str(known)):
            return known
    return f"{begin}{datetime.date.today()}"


@functools.cache
def variables_of(chat_template) -> set[str]:
    """The names that a chat template reads. It is a program in the language of jinja."""
    parsed = _compile_jinja_template(chat_template).environment.parse(chat_template)
    # strftime_now is a global of transformers, so jinja does not call it undeclared.
    used = {name.name for name in parsed.find_all(nodes.Name)} & {DATE}
    return find_undeclared_variables(parsed) | used


@functools.cache
def find_switches(template_flag, chat_template) -> dict:
    """{switch: value} of --template chat?SWITCH=VALUE. Raises ValueError."""
    query = template_flag.partition("?")[2]
    if not query:
        return {}
    switches = {}
    for name, text in urllib.parse.parse_qsl(query, strict_parsing=True, keep_blank_values=True):
        if name in switches:
            raise ValueError(f"its switch {name} is set twice")
        if name == DATE:
            switches[name] = text
            continue
        try:
            switches[name] = json.loads(text)
        except ValueError:
            # A word needs no quotes. Python's False is refused: as a text it would count as true.
            if not text.isidentifier() or text.lower() in ("true", "false", "none"):
                advice = "write true, false, a number or a word"
                raise ValueError(f"{name}={text} is no value; {advice}") from None
            switches[name] = text
    known = variables_of(chat_template) - {"messages", "add_generation_prompt"}
    unknown = ", ".join(switches.keys() - known)
    if unknown:
        raise ValueError(f"its chat template has no switch {unknown}; it reads {sorted(known)}")
    return switches
