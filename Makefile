# The newcomer's entry. All build logic is in CMakePresets.json; this file installs and calls.
.PHONY: build run test bench cuda clean python

JOBS ?= $(shell nproc)
MODEL ?= build/models/t1

build:
	@tools/install.sh build
	@tools/grammar.sh
	@test -f build/build.ninja || cmake --preset release
	cmake --build --preset release -j $(JOBS) --target cachalot

# Until a trained model ships, the main job runs on a synthetic checkpoint: random weights, so the text
# is noise, but every part of the architecture is at work.
$(MODEL)/config.json:
	build/cachalot synth --preset t1 --seed 1 --out $(MODEL)

run: build
	@$(MAKE) --no-print-directory $(MODEL)/config.json
	@echo "Generating from a synthetic checkpoint (random weights: the text is noise)." >&2
	build/cachalot run -m $(MODEL) -p "The sperm whale dives" -n 64 --seed 1

python: .venv/installed

.venv/installed: requirements-dev.txt
	@tools/install.sh test
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@

test: build python
	cmake --preset release >/dev/null
	cmake --build --preset release -j $(JOBS)
	ctest --preset release -j $(JOBS)

bench: build
	build/cachalot bench ops

cuda:
	@tools/install.sh build
	@tools/grammar.sh
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS)

clean:
	rm -rf build build-*
