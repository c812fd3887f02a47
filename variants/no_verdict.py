"""The replies of tasks/chain.py have `?` in place of their verdict.

So the policy and the critic are not told whether a letter was right. The model of
`tools/base_model.py chain` has seen half of its texts in this form.
"""

import ppo
from nanoorz.flags import require


class NoVerdict(ppo.Recipe):
    def check(self, world):
        super().check(world)
        require(self.task == "chain", f"--variant no_verdict is for --task chain, not {self.task}")

    def reply_function(self, task):
        def reply(text, finish_reason, label):
            answer = task.reply(text, finish_reason, label)
            return answer and "?" + answer[1:]

        return reply
