# The newcomer's entry. All build logic is in CMakePresets.json; this file installs and calls.
.PHONY: build run test bench cuda clean python

JOBS ?= $(shell nproc)
MODEL ?= models/krill

build:
	@tools/install.sh build
	@tools/grammar.sh
	@test -f build/build.ninja || cmake --preset release
	cmake --build --preset release -j $(JOBS) --target cachalot

run: build
	build/cachalot run -m $(MODEL) -p "The sperm whale" -n 64 --seed 1

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
