#!/usr/bin/env bash
# Run the studies in recipes/studies, two at a time, and write their report as one page, out/report.html:
#   make report                      uses sentences that the demo generates; takes a few minutes
#   make report DATA=../shared/data  uses real data sets and the small Llama; takes about an hour
# After an interruption, the second command resumes the training runs and the studies that `--resume` supports. Other
# results of an earlier call are replaced.
set -uo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

data=${1:-} out=out/studies tasks="sst2 cola qnli conll2003 stories260k" tuned=tuned resume=--resume failed=0
if [ -z "$data" ]; then
    data=out/report/corpus out=out/report tasks=demo tuned=demo-tuned resume=--overwrite
    python -c "from lamina.demo.corpus import write; write('$data', rows=480)" || exit
fi

# Discard standard output, because the page shows the same results. A failed command sets the exit status, and the
# other commands continue.
run() {
    local folder=$1
    shift
    while [ "$(jobs -pr | wc -l)" -ge 2 ]; do wait -n || failed=1; done
    echo "lamina $* -o $folder"
    lamina "$@" --data "$data" -o "$folder" --no-progress > /dev/null &
}
finish() {
    while [ -n "$(jobs -p)" ]; do wait -n || failed=1; done
}
# Run the studies with these names that each task's recipe contains. The first argument is `$resume` for studies with
# cells, which can be resumed, and --overwrite for other studies.
studies() {
    local more=$1 task study
    shift
    for task in $tasks; do
        for study in "$@"; do
            if grep -q "^  $study:" "recipes/studies/$task.yaml"; then
                run "$out/$task/$study" study "$study" "recipes/studies/$task.yaml" $more
            fi
        done
    done
    finish
}

run "$out/tuned" train "recipes/studies/training/$tuned.yaml" $resume
for task in $tasks; do
    readers="recipes/studies/training/$task-readers.yaml"
    if [ -f "$readers" ]; then run "$out/$task/readers" train "$readers" $resume; fi
done
finish
studies "$resume" probe removal advise
studies "--overwrite" errors similarity variability drift lens importance # variability reads the results of probe

written="$out/tuned"
for task in $tasks; do
    for part in readers probe removal advise errors similarity variability drift lens importance; do
        if [ -f "$out/$task/$part/lamina_study.json" ] || [ -f "$out/$task/$part/report.json" ]; then
            written="$written $out/$task/$part"
        fi
    done
done
lamina report $written -o out/report.html || exit
exit "$failed"
