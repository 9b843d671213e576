#!/usr/bin/env bash
# Raw prompts with curl: continued, streamed, as token ids, and scored.
#
#   kestrel serve --model HuggingFaceTB/SmolLM2-135M-Instruct
#   examples/completions.sh [http://127.0.0.1:8080]
#
# KESTREL_API_KEY is the server's key, if it has one.
set -euo pipefail

url=${1:-http://127.0.0.1:8080}

post() {
  curl --silent --show-error "$url$1" --header 'Content-Type: application/json' --data "$2" \
    --header "Authorization: Bearer ${KESTREL_API_KEY:-}"
  echo
}

# Two prompts, two choices each. The same seed gives the same texts.
post /v1/completions '{"prompt": ["The capital of France is", "2 + 2 ="], "n": 2, "max_tokens": 8, "seed": 1}'

# Token by token, until the first full stop.
post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 20, "stop": ".", "temperature": 0, "stream": true}'

# The ids of a text, and a prompt of ids.
post /tokenize '{"prompt": "The capital of France is"}'
post /v1/completions '{"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}'

# How likely each token of a text is: the text itself comes back, with nothing behind it.
post /v1/completions '{"prompt": "The capital of France is Paris", "echo": true, "logprobs": 2, "max_tokens": 0}'
