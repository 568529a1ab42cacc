"""Tables of post-stall made by hand: every step is 10 ms, and a step with a post in it is longer."""

import numpy as np
import pandas as pd

ARM = {"arm": "a", "start": 0, "warmup": False}


def tables(slope, *, repetitions=8, posts_ms=(5.0, 20.0, 40.0), uncertainty_s=0.004):
    """Steps of 10 ms; pull k is posted in step 20 * (k + 1), which gets ``slope`` times the post longer."""
    requests, pulls, phases, begin = [], [], [], 100.0
    for repetition in range(repetitions):
        for kind in ("pull", "control"):
            name = {**ARM, "phase": f"{kind} 512", "repetition": repetition}
            gaps = np.full(100, 10.0)
            for k, post in enumerate(posts_ms if kind == "pull" else ()):
                at = 20 * (k + 1)
                start = begin + (50 + gaps[:at].sum() + 5) / 1e3  # 5 ms into the step
                gaps[at] += slope * post
                pulls.append({**name, "prompt_tokens": 512, "start_s": start, "start_uncertainty_s": uncertainty_s})
                pulls[-1] |= {"post_us": post * 1e3, "xfer_us": post * 1e3, "bytes": 1000, "descriptors": 7}
            same = {
                "start_s": begin,
                "ttft_ms": 50.0,
                "gaps_ms": list(gaps),
                "longest_gap_ms": gaps.max(),
                "error": None,
            }
            requests += [{**name, "request": f"{kind}{repetition}{i}", "pulled_tokens": 512, **same} for i in range(2)]
            phases.append({**name, "pulled_tokens": 512, "start_s": begin})
            begin += 10
    return pd.DataFrame(pulls), pd.DataFrame(requests), pd.DataFrame(phases)
