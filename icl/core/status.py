"""Where a run stands, and how an attempt at it ended: one vocabulary for each.

| the latest attempt      | the run                                                                 |
|-------------------------|-------------------------------------------------------------------------|
| none, or nothing saved  | pending                                                                 |
| is under way            | running: here, or where another process says that it trains it          |
| complete                | complete                                                                |
| already_complete        | complete: nothing was left to do                                        |
| interrupted             | stopped: the next attempt goes on from its newest state                 |
| running_elsewhere       | running, by another process; a sweep looks again later                  |
| failed                  | failed; in a sweep that still tries again, stopped until the attempts are used up |
| was cut off             | stopped                                                                 |

`icl.store ls` reads no attempts: for it a run is complete, or "incomplete", which is every other status.
"""

from typing import Literal, TypeAlias

RunStatus: TypeAlias = Literal["pending", "running", "stopped", "failed", "complete"]
AttemptStatus: TypeAlias = Literal["complete", "already_complete", "interrupted", "running_elsewhere", "failed"]
