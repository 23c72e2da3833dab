"""`bigmodel.api` under the name that scripts import: the very same module, so that a name patched in one is seen in the other."""

from __future__ import annotations

import sys

from . import api

sys.modules[__name__] = api
