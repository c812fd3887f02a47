"""A variant for tests: ZeRO 3 shards the small parameters too, which it keeps whole otherwise."""

import ppo


class ShardEverything(ppo.Recipe):
    def engine_settings(self, settings):
        settings = super().engine_settings(settings)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings
