"""Call a running splitserve from another Ray program, without HTTP.

Start one with ``make serve``, then run this in a second terminal: ``.venv/bin/python docs/examples/call_from_ray.py``
"""

import ray
from ray import serve

MODEL = "smollm2"


def main() -> None:
    ray.init(address="auto", logging_level="error")
    handle = serve.get_app_handle("splitserve")

    question = {"role": "user", "content": "What is the capital of France?"}
    chat = {"model": MODEL, "messages": [question], "temperature": 0, "max_tokens": 16}
    answer = handle.chat.remote(chat).result(timeout_s=60)
    print("chat:", answer["choices"][0]["message"]["content"])

    completion = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 8, "stream": True}
    print("complete:", end="")
    for chunk in handle.options(stream=True).complete.remote(completion):
        print(chunk["choices"][0]["text"], end="", flush=True)
    print()

    tokens = {"prompt_token_ids": [504, 3575, 282], "temperature": 0, "max_tokens": 4}
    for item in handle.options(stream=True).generate.remote(tokens):
        print("generate:", item["token_ids"], item["finish_reason"])


if __name__ == "__main__":
    main()
