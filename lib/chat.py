"""--template chat: prompts in the tokenizer's chat template. Only such a run loads this file."""

from lib.common import UserError, one_line


def as_chat(text, tokenizer, cfg):
    """The text as a user's turn in the tokenizer's own chat template. Raises UserError."""
    turns = [{"role": "user", "content": text}]
    if cfg.system:
        turns = [{"role": "system", "content": cfg.system}, *turns]
    try:
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if text.strip() not in prompt:
            raise ValueError("its chat template leaves the question out")
        return prompt
    # A chat template is a program by the model's author. It may raise anything.
    except Exception as error:
        raise UserError(
            f"--template chat: {cfg.model}: {one_line(error)}; give another --template"
        ) from error
