#!/usr/bin/env bash
# Run the studies of recipes/studies, two at a time, and draw them all on one page, out/report.html:
#   make report                      on sentences that the demo makes, in a few minutes
#   make report DATA=../shared/data  on real sets and the small Llama, in about an hour; killed, it goes on where it was
set -uo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

data=${1:-} out=out/studies tasks="sst2 cola qnli conll2003 stories260k" tuned=tuned resume=--resume failed=0 folders=
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
    folders="$folders $folder"
}
finish() {
    while [ -n "$(jobs -p)" ]; do wait -n || failed=1; done
}

run "$out/tuned" train "recipes/studies/training/$tuned.yaml" $resume
for task in $tasks; do
    readers="recipes/studies/training/$task-readers.yaml"
    if [ -f "$readers" ]; then run "$out/$task/readers" train "$readers" $resume; fi
done
finish
for task in $tasks; do
    for study in probe removal advise errors similarity variability drift lens importance; do
        if grep -q "^  $study:" "recipes/studies/$task.yaml"; then
            case $study in probe | removal | advise) more=$resume ;; *) more= ;; esac
            run "$out/$task/$study" study "$study" "recipes/studies/$task.yaml" $more
        fi
    done
done
finish

written=
for folder in $folders; do
    if [ -f "$folder/lamina_study.json" ] || [ -f "$folder/report.json" ]; then written="$written $folder"; fi
done
lamina report $written -o out/report.html || exit
exit "$failed"
