#!/bin/sh
# An agent as a short shell script, for a sandbox: it asks the model twice and prints the second answer.
#
# rollout: {agent: {command: [sh, ask_twice.sh], sandbox: true, files: {ask_twice.sh: examples/agents/ask_twice.sh}}}
set -e
task=$(tr -d '"\\' | tr '\n' ' ')

ask() { # messages -> the answer, as a JSON string
  reply=$(curl -sS --fail "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
    -d "{\"model\": \"policy\", \"messages\": [$1]}")
  printf '%s\n' "$reply" | sed -n 's/.*"content":\("\([^"\\]\|\\.\)*"\).*/\1/p'
}

question="{\"role\": \"user\", \"content\": \"$task\"}"
check="{\"role\": \"user\", \"content\": \"Check your answer, then give it again.\"}"
first=$(ask "$question")
second=$(ask "$question, {\"role\": \"assistant\", \"content\": $first}, $check")
printf '%s\n' "$second"
