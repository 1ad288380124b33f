#!/usr/bin/env bash
# Run the studies of recipes/studies, two at a time, and draw them all on one page, out/report.html:
#   make report                      on sentences that the demo makes, in a few minutes
#   make report DATA=../shared/data  on real sets and the small Llama, in about an hour; killed, it goes on where it was
set -uo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

data=${1:-} out=out/studies tasks="sst2 cola qnli conll2003 stories260k" tuned=tuned resume=--resume failed=0
if [ -z "$data" ]; then
    data=out/report/corpus out=out/report tasks=demo tuned=demo-tuned resume=
    python -c "from lamina.demo.corpus import write; write('$data', rows=480)" || exit
fi

# What is printed is on the page; what fails is told, and the rest goes on.
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
# The studies of these names that a task's recipe has, which `--resume` goes on with if they have cells.
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
studies "" errors similarity variability drift lens importance # variability reads the probes

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
