#!/bin/sh
# An agent in some lines of shell, for a sandbox: it asks, has the answer checked, and prints the second one.
#
# rollout: {agent: {command: [sh, ask_twice.sh], sandbox: true, files: {ask_twice.sh: examples/agents/ask_twice.sh}}}
set -e
task=$(tr -d '"\\' | tr '\n' ' ')

ask() { # messages -> the answer, as JSON has it
  said=$(curl -sS --fail "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
    -d "{\"model\": \"policy\", \"messages\": [$1]}")
  printf '%s\n' "$said" | sed -n 's/.*"content":\("\([^"\\]\|\\.\)*"\).*/\1/p'
}

question="{\"role\": \"user\", \"content\": \"$task\"}"
check="{\"role\": \"user\", \"content\": \"Check your answer, then give it again.\"}"
first=$(ask "$question")
second=$(ask "$question, {\"role\": \"assistant\", \"content\": $first}, $check")
printf '%s\n' "$second"
