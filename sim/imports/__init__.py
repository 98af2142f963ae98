"""What a user already has (configurations of other tools) as a scenario: the verb `import`.

A reader takes settings out of files (`settings.Settings`) into a draft (`draft.Draft`); `Draft.finish` makes the
scenario of it. Whatever stands in a file ends in one of five lists: taken, not to be said, without change,
without effect, not known; a sixth is what was assumed.
"""

from __future__ import annotations
