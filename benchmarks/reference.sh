#!/usr/bin/env bash
# The commands behind the figures in results/ and in the README, in order. Each run resumes where it stopped; together
# they take most of a day on 2 cores. SQUAD is a SQuAD v1.1 JSON file: ours was the half of the dev set (24 articles) that
# github.com/bloomsburyai/question-generation keeps as data/test-v1.1.json, prompts having been designed on the other.
set -euo pipefail
cd "$(dirname "$0")/.."
SQUAD=${SQUAD:-dev-v1.1-part2.json}

# NIAH 4k and 8k
uv run eval_niah.py --config all
uv run eval_niah.py --config all --haystack prose
uv run eval_niah.py --config L3 --evict-at chunk --lengths 8192

# KVzap: the surrogates, then L6 (the default threshold is stored with them)
uv run train_kvzap.py --threshold -3
for haystack in noise prose; do
    uv run eval_niah.py --config L6 --haystack "$haystack"
    uv run benchmarks/peer_kvpress.py --threshold -3 --haystack "$haystack"
done

# Scorers at equal memory, all after a dense prefill: a share of each head's entries, or of all heads' together
prune() { # scorer, share kept, "" or --pooled
    for haystack in noise prose; do
        file=L6-$1-keep$2${3#-}$([ "$haystack" = noise ] || echo "-$haystack").jsonl
        uv run eval_niah.py --config L6 --lengths 4096 --haystack "$haystack" --scorer "$1" --keep "$2" $3 \
            --prune-at prefill --out "results/kvzap/ablation/smollm2/$file"
    done
}
for keep in 0.6 0.4 0.2; do
    for scorer in kvzap-mlp kvzap-linear kvzip+; do prune "$scorer" "$keep" --pooled; done
    for scorer in kvzap-mlp key-norm streaming random; do prune "$scorer" "$keep" ""; done
done
uv run bootstrap.py results/kvzap --compare L6-kvzap-mlp-keep0.4-pooled L6-key-norm-keep0.4 \
    --markdown results/kvzap/README.md --plots results/kvzap/plots

# SQuAD 8k
uv run eval_squad.py --config all --squad "$SQUAD"
for config in L3 L4 L2; do
    uv run eval_squad.py --config "$config" --squad "$SQUAD" --n 60
    uv run eval_squad.py --config "$config" --squad data/squad_cognito.json --n 60
done

# Stress 16k and 32k
uv run eval_stress.py --config all
uv run eval_stress.py --config L3 --kv-budget 4096 --evict-at chunk

# Speed
uv run benchmarks/bench_kv.py --repeats 2

# Tables and pictures
uv run bootstrap.py --markdown README.md --plots results/plots
