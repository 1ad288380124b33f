"""Readers inside vLLM: side answers from the engine's own passes.

Installing `lamina[vllm]` next to vLLM is enough: vLLM finds the plugin by its entry point. It acts only on engines that
are started with a bank:

```python
llm = vllm.LLM(MODEL, additional_config={"lamina": {"bank": FOLDER_OR_HUB_ID}})
(output,) = llm.generate("A fine film.")
output.lamina["sentiment"]["prompt"]  # {"label": "positive", "probabilities": {"negative": 0.02, "positive": 0.98}}
```

`plugin` puts three hooks into an engine: `worker` reads the states of each step, `transport` hands the scores from the
worker to the frontend, and `frontend` turns them into the answers of a request (`answers`). In a server, `http` adds
the answers to the responses, and `endpoint` is a plugin of its own, with a route that describes the readers.
"""
