"""Ramps the load on a running server until it is too much, and reports what each stage gave.

python -m kestrel.main serve --max-batch-size 8 --port 8080
python examples/benchmark_http_server.py --url http://127.0.0.1:8080/v1/query --image examples/images/01.png \
    --stage-duration 30 --start-concurrency 1 --concurrency-step 2 --max-concurrency 32 \
    --latency-threshold-ms 4000 --ttft-threshold-ms 2500 --error-threshold 0.10 --output bs8.json --report bs8.html

Compare earlier runs side by side, without a server:

python examples/benchmark_http_server.py --report all.html bs4.json bs8.json bs16.json
"""

from __future__ import annotations

from kestrel.bench.http_load.command import main

if __name__ == "__main__":
    raise SystemExit(main(description=__doc__))
