"""The replies of tasks/chain.py have `?` in place of their verdict. It is only for this task.

So the policy and the critic are not told whether a letter was right. The model of
`tools/base_model.py chain` has seen half of its texts in this form.
In the chains such a critic explains nothing, and more runs break: docs/lab.md.
"""

import ppo


class NoVerdict(ppo.Recipe):
    def reply_function(self, task):
        def reply(text, finish_reason, label):
            answer = task.reply(text, finish_reason, label)
            return "?" + answer[1:] if answer else None

        return reply
