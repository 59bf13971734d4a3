"""An independent definition of the model for tests: plain NumPy, float64, no caches.

It was written from the published definition alone and must stay that way: nothing here may be
derived from the engine, or the two would share their mistakes.

    formats            scalar formats, quantizers, cache rows, stored weights
    checkpoint         config.json and safetensors
    engram             token classes, table primes, multipliers, row ids
    model              the forward pass, its ablations and its margins
    drafter            blocks of draft tokens behind the target's context
    compare            rules for judging another implementation's dump
    run                command line, the counterpart of `cachalot score`
    random_checkpoint  small random checkpoints for the oracle's own tests
"""

import os

# The products here are small: a second BLAS thread doubles their time. NumPy reads this once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
