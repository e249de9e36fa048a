#!/usr/bin/env bash
# The commands behind the files in results/ and the figures in results/README.md and README.md, in order. Each run resumes
# where it stopped; together they take more than a day on 2 cores. SQUAD is a SQuAD v1.1 JSON file: ours was the half of the
# dev set (24 articles) that github.com/bloomsburyai/question-generation keeps as data/test-v1.1.json, prompts having been
# designed on the other.
set -euo pipefail
cd "$(dirname "$0")/.."
SQUAD=${SQUAD:-dev-v1.1-part2.json}

# NIAH 4k and 8k
uv run eval_niah.py --config all
uv run eval_niah.py --config all --haystack prose
uv run eval_niah.py --config L3 --evict-at chunk --lengths 8192

# Re-based positions: moved together, and in order of rank; at three budgets
for haystack in noise prose; do
    arms=()
    for budget in 0.4 0.2 0.1; do
        for positions in absolute rebased ranked; do
            arms+=(-- --config L3 --kv-budget $budget --positions $positions)
        done
    done
    OMP_NUM_THREADS=1 uv run benchmarks/sweep.py eval_niah --haystack $haystack "${arms[@]}" -- --config L4 --positions rebased
done

# The KV bytes of one needle, step by step. A trace is appended to, so it begins anew; its row is not kept
trace() { # name of the trace, flags of the evaluation
    local file=results/niah/smollm2/$1.trace.jsonl; shift
    rm -f "$file"
    uv run eval_niah.py --lengths 4096 --n 1 --out "$(mktemp -d)/row.jsonl" --trace "$file" "$@"
}
trace L2 --config L2
trace L3 --config L3
trace L3-inflight --config L3 --evict-at chunk

# KVzap: the surrogates (results/surrogates/smollm2), then L6 (the default threshold is stored with them) and kvpress
uv run train_kvzap.py --threshold -3
for haystack in noise prose; do
    uv run eval_niah.py --config L6 --haystack "$haystack"
    uv run benchmarks/peer_kvpress.py --threshold -3 --haystack "$haystack"
done

# Scorers at equal memory, all after a dense prefill: a share of each head's entries, or of all heads' together (-pooled)
prune() { # task, suffix of the files, scorers, flags of the evaluation
    local task=$1 suffix=$2 scorers=$3 arms=() form keep scorer pooled; shift 3
    for form in $scorers; do
        scorer=${form%-pooled} pooled=${form#"$scorer"}
        for keep in 0.6 0.4 0.2; do
            arms+=(-- --scorer "$scorer" --keep "$keep" ${pooled:+--pooled}
                   --out "results/$task/smollm2/ablation/L6-$scorer-keep$keep$pooled$suffix.jsonl")
        done
    done
    uv run benchmarks/sweep.py "eval_$task" --config L6 --prune-at prefill "$@" "${arms[@]}"
}
ALL="kvzap-mlp kvzap-mlp-pooled kvzap-linear kvzap-linear-pooled key-norm key-norm-pooled streaming random kvzip+ kvzip+-pooled"
BEST="kvzap-mlp-pooled key-norm" # each in the form that finds more at 4k
prune niah "" "$ALL" --lengths 4096
prune niah -prose "$ALL" --lengths 4096 --haystack prose
prune niah "" "$BEST streaming" --lengths 8192
prune niah -prose "$BEST streaming" --lengths 8192 --haystack prose
prune squad -squad_cognito "$BEST" --squad data/squad_cognito.json --n 30
prune stress "" "$BEST" --lengths 16384

# Which heads the scorers feed where all share one budget, and how far they agree with the oracle
uv run benchmarks/heads.py

# SQuAD 8k: 15 questions, then 60 for those that share a prefill
uv run eval_squad.py --config all --squad "$SQUAD"
for file in "$SQUAD" data/squad_cognito.json; do
    uv run benchmarks/sweep.py eval_squad --squad "$file" --n 60 -- --config L2 -- --config L3 -- --config L4
done

# Stress 16k and 32k
uv run eval_stress.py --config L1
for length in 16384 32768; do
    uv run benchmarks/sweep.py eval_stress --lengths $length -- --config L2 -- --config L3 -- --config L4 -- --config L5
done
uv run eval_stress.py --config L3 --kv-budget 4096 --evict-at chunk

# Stress re-based in flight: no YaRN, and no end
rebased() { # budget, haystack, lengths
    local budget=$1 haystack=$2; shift 2
    OMP_NUM_THREADS=1 uv run eval_stress.py --config L3 --kv-budget "$budget" --evict-at chunk --positions rebased \
        --haystack "$haystack" --lengths "$@"
}
rebased 2048 noise 16384 32768 65536 131072
rebased 2048 prose 16384 32768 65536 131072
rebased 4096 noise 16384 32768 65536
rebased 4096 prose 16384 32768
# Seconds by length, in one run; its rows are not kept
rebased 2048 noise 16384 32768 65536 131072 --n 1 --out "$(mktemp -d)/row.jsonl"

# Many questions about one text: one reading against reading again
uv run benchmarks/questions.py --plot
uv run benchmarks/questions.py --seeds 0 1 2 \
    --arms L2 L3-budget0.1 L3-budget0.1-rebased L3-budget0.1-ranked rag-budget0.1 rag-budget0.1-ranked

# Speed
uv run benchmarks/bench_kv.py --repeats 2

# The demo of README.md: prints, and writes nothing
uv run cognito_run.py

# Tables and pictures
uv run bootstrap.py --markdown results/README.md --plots results/plots
uv run bootstrap.py results/{niah,squad,stress}/smollm2/ablation results/niah/smollm2/L2{,-prose}.jsonl \
    results/squad/smollm2/L2-squad_cognito.jsonl results/stress/smollm2/L2.jsonl \
    --compare L6-kvzap-mlp-keep0.4-pooled L6-key-norm-keep0.4 \
    --markdown results/README.md --block ablation --plots results/plots/ablation
uv run bootstrap.py results/questions --compare L3-budget0.1-ranked rag-budget0.1 --markdown results/README.md --block questions
