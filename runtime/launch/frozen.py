"""The last import of a process that is to be forked: collectors of garbage leave alone what it imported.

A collector that looks at what was imported copies its memory for each fork: half of a short job.
"""

import gc

gc.collect()
gc.freeze()
