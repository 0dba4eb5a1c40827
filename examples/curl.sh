#!/usr/bin/env bash
# Print an answer over HTTP, with curl and jq: as it comes (generate_stream), or with --whole in one piece (generate).
# Ctrl-C closes the connection, which cancels the request.
#
# examples/curl.sh --max-tokens 40 "def binary_search("
set -euo pipefail

url=http://127.0.0.1:8000 model=glm53-tiny max_tokens=64 temperature=0 stream=true prompt=
usage="usage: $0 [--url http://HOST:PORT] [--model NAME] [--max-tokens N] [--temperature T] [--whole] PROMPT"
while (($#)); do
    case $1 in
        --whole) stream=false; shift; continue ;;
        -h | --help) echo "$usage"; exit 0 ;;
        --*) ;;
        *) prompt=$1; shift; continue ;;
    esac
    (($# > 1)) || { echo "$usage" >&2; exit 2; }
    case $1 in
        --url) url=$2 ;;
        --model) model=$2 ;;
        --max-tokens) max_tokens=$2 ;;
        --temperature) temperature=$2 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
    shift 2
done
[[ -n $prompt ]] || { echo "$usage" >&2; exit 2; }

request=$(jq -n --arg text "$prompt" --arg id "curl-$$" --argjson max_tokens "$max_tokens" \
    --argjson temperature "$temperature" --argjson stream "$stream" \
    '{id: $id, text_input: $text, max_tokens: $max_tokens, temperature: $temperature, stream: $stream}')

# Each response is JSON: with text_output, or with error, which begins CODE id=... Streams have `data: ` before it.
[[ $stream == true ]] && call=generate_stream || call=generate
curl --silent --show-error --no-buffer --data-binary "$request" "$url/v2/models/$model/$call" |
    sed --unbuffered 's/^data: //' |
    jq --unbuffered --join-output 'if .error then ("error: " + .error + "\n" | halt_error) else .text_output end'
echo
