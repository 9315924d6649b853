"""The user's own start-up hook."""

import os

os.environ["SHADOW_SITECUSTOMIZE"] = "ran"
