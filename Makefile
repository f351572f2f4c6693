# SPDX-License-Identifier: Apache-2.0

# Everything here runs on a machine with nothing installed: each target first installs what it needs
# (scripts/setup.sh), into the system with apt and into .tools. `make help` lists the targets.

SHELL := /bin/bash
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
# Of a tool's symbolic link it is the link that tells when another was chosen.
MAKEFLAGS += --no-print-directory --no-builtin-rules --check-symlink-times

SETUP := scripts/setup.sh
export CLANG
export PATH := $(CURDIR)/.tools/bin:$(PATH)

# One static binary, to be copied to any host. Go stamps it with a version after git's tags, commit and
# changes. Git refuses root a clone of another user, unless told that it may; without a repository, or
# git, there is no stamp.
export CGO_ENABLED := 0
export GIT_CONFIG_COUNT := 1
export GIT_CONFIG_KEY_0 := safe.directory
export GIT_CONFIG_VALUE_0 := $(CURDIR)
STAMP := $(shell git -c safe.directory='$(CURDIR)' rev-parse --verify HEAD >/dev/null 2>&1 && echo auto || echo false)
export GOFLAGS += -buildvcs=$(STAMP)

# What bpf2go compiles with, in every //go:generate line. asm/types.h has no version for BPF; the
# host's will do.
export BPF2GO_CC := $(CURDIR)/.tools/bin/clang
export BPF2GO_STRIP := $(CURDIR)/.tools/bin/llvm-strip
export BPF2GO_CFLAGS := -mcpu=v3 -fno-strict-aliasing -Wall -Werror -I/usr/include/$(shell uname -m)-linux-gnu

BPF := $(wildcard bpf/*/*.c bpf/*/*.h)
REPORTER := $(wildcard loadshm/*.h loadshm/example/c/*.c loadshm/testdata/*.c)
GENERATORS := $(shell grep -rl --include='*.go' '^//go:generate' cmd internal)
GENERATED := bin/.generated
SCRIPTS := $(SETUP) .ci/run

##@ Use
.PHONY: demo
demo: setup-demo build ## run a small data centre on this machine and load it, then clean up (root)
	bin/segue lab demo

.PHONY: build
build: generate ## build bin/segue
	go build -o bin/ ./cmd/segue

##@ Develop
# Not with `go run`, which, terminated, would not wait for the tests to clean up.
.PHONY: test
test: setup-test build ## run every test: unit, packet, end-to-end (root); TIER=unit for one tier
	go build -o bin/test-run ./test/run
	bin/test-run $(TIER)

.PHONY: bench
bench: build ## measure what packets cost, memory, tables and throughput (root; some minutes)
	bin/segue bench
	bin/segue bench memory
	bin/segue bench tables
	bin/segue bench throughput

.PHONY: soak
soak: setup-test build ## run the long forms of end-to-end tests, which rewrite a table in docs/ (root; 20 minutes)
	go build -o bin/test-run ./test/run
	bin/test-run soak

FUZZTIME := 10m
.PHONY: fuzz
fuzz: setup-test generate ## run all fuzzers, for FUZZTIME (10m) together (root)
	go build -o bin/test-run ./test/run
	bin/test-run fuzz $(FUZZTIME)

.PHONY: lint
lint: setup-lint generate ## check licence lines, format and correctness of C, Go and shell
	go run ./test/spdx
	clang-format-19 --dry-run -Werror $(BPF) $(REPORTER)
	shellcheck $(SCRIPTS)
	@unformatted=$$(gofmt -l cmd internal loadshm test) && \
		if [ -n "$$unformatted" ]; then echo "not as gofmt would have it:" $$unformatted; exit 1; fi
	go vet ./...
	go tool staticcheck ./...

.PHONY: format
format: setup-lint ## format C and Go in place, and add licence lines
	go run ./test/spdx -w
	clang-format-19 -i $(BPF) $(REPORTER)
	gofmt -w cmd internal loadshm test

.PHONY: generate
generate: setup-build $(GENERATED) ## compile the BPF programs and their Go bindings

$(BPF2GO_CC): | setup-build

$(GENERATED): $(BPF) $(GENERATORS) $(BPF2GO_CC) go.mod Makefile
	@find cmd internal -name '*_bpfel*' -delete # also of packages that have moved
	go generate ./...
	@mkdir -p $(@D) && touch $@

.PHONY: clean
clean: ## remove what was built; the tools in .tools stay
	rm -rf bin
	find . -name '*_bpfel*.go' -delete -o -name '*_bpfel*.o' -delete

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } \
		/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup-build setup-demo setup-test setup-lint
setup-build:
	@$(SETUP) build
setup-demo:
	@$(SETUP) build demo
setup-test:
	@$(SETUP) build demo test
setup-lint:
	@$(SETUP) build lint
