# SPDX-License-Identifier: Apache-2.0

# Every target works on a machine with nothing installed. It first runs scripts/setup.sh, which
# installs what the target needs, with apt and into .tools. `make help` lists the targets.

SHELL := /bin/bash
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
# If setup chooses another compiler, only the time of the symbolic link to it changes. So check the
# time of links.
MAKEFLAGS += --no-print-directory --no-builtin-rules --check-symlink-times

SETUP := scripts/setup.sh
export CLANG
export PATH := $(CURDIR)/.tools/bin:$(PATH)

# The programs are static, so they can be copied to any host.
export CGO_ENABLED := 0

# -trimpath is needed for the package. It is set everywhere, because Go would compile everything
# again with another flag. -buildvcs=false leaves out Go's own stamp of the commit, because a
# package built from a copy of the source without a repository would then differ. COMMIT takes its
# place.
export GOFLAGS += -buildvcs=false -trimpath

# The programs have no symbol table and no debugging information: segue has 35 MB instead of 50 MB.
# Debuggers (gdb, delve), `go tool nm` and perf's function names need both; `make build LDFLAGS=`
# keeps them. Stack traces, profiles by pprof and `segue version` work without them.
LDFLAGS := -s -w

# The version and the commit, which `segue version` shows. The package has the same version. Both
# are empty without git or without a repository. scripts/version.sh describes their forms.
VERSION := $(shell scripts/version.sh)
COMMIT := $(shell scripts/version.sh --commit)
override LDFLAGS += $(VERSION:%=-X github.com/segue-lb/segue/internal/version.release=%)
override LDFLAGS += $(COMMIT:%=-X github.com/segue-lb/segue/internal/version.commit=%)

# Shows how many packages Go has compiled. The first build takes a minute or two, and Go itself
# would print nothing. Lines with spaces or colons are messages, and are passed on.
PROGRESS := awk '/[ :]/ { print } !/[ :]/ { n++ } \
	!/[ :]/ && n == 20 { print "build: compiling about 500 packages, which takes a minute or two the first time" } \
	!/[ :]/ && n % 100 == 0 { print "build: " n " packages are compiled" } { fflush() }'

# bpf2go uses this compiler and these flags in every //go:generate line. The folder after -I has the
# host's asm/types.h, because there is none for BPF.
export BPF2GO_CC := $(CURDIR)/.tools/bin/clang
export BPF2GO_STRIP := $(CURDIR)/.tools/bin/llvm-strip
export BPF2GO_CFLAGS := -mcpu=v3 -fno-strict-aliasing -Wall -Werror -I/usr/include/$(shell uname -m)-linux-gnu

BPF := $(wildcard bpf/*/*.c bpf/*/*.h bpf/*/*/*.h)
REPORTER := $(wildcard loadshm/*.h loadshm/example/c/*.c loadshm/testdata/*.c modules/*/*.c)
GENERATORS := $(shell grep -rl --include='*.go' '^//go:generate' cmd internal lab research)
GENERATED := bin/.generated
SCRIPTS := $(SETUP) .ci/run scripts/version.sh packaging/build.sh modules/build.sh packaging/modules.sh $(wildcard packaging/modules/*-p*) $(wildcard packaging/scripts/* docs/examples/*/*.sh)

##@ Use
.PHONY: demo
demo: setup-demo build ## build a data centre on this machine, send requests, remove it (root)
	bin/segue-lab lab demo

.PHONY: mediawiki
mediawiki: setup-mediawiki build ## install what the lab's MediaWiki servers need (root)

.PHONY: build
build: generate ## build bin/segue and bin/segue-lab
	@echo 'build: bin/segue and bin/segue-lab'
	@set -o pipefail; go build -v -ldflags '$(LDFLAGS)' -o bin/ ./cmd/segue ./cmd/segue-lab 2>&1 | $(PROGRESS)

.PHONY: modules
modules: setup-modules ## build the modules for this machine's Apache and nginx, and their packages, in bin/
	modules/build.sh
	VERSION='$(VERSION)' packaging/modules.sh

.PHONY: package
package: generate ## build the packages in bin/, deb and rpm; ARCH=arm64 or amd64, if not the machine's
	GOARCH='$(ARCH)' VERSION='$(VERSION)' LDFLAGS='$(LDFLAGS)' packaging/build.sh

##@ Develop
# `go build` and not `go run`: when `go run` is terminated, it does not wait until the tests have
# cleaned up.
.PHONY: test
test: setup-test build ## run the tests: unit, packet, end-to-end (root); TIER='long race package' for the others
	go build -o bin/test-run ./test/run
	bin/test-run $(TIER)

.PHONY: bench
bench: build ## measure packets, memory, tables, throughput and changes (root; some minutes)
	bin/segue-lab bench
	bin/segue-lab bench memory
	bin/segue-lab bench tables
	bin/segue-lab bench throughput
	bin/segue-lab bench control
	go test ./internal/balancer ./internal/control -run '^$$' -bench '^Benchmark(ManyServices|Drain)$$'

.PHONY: soak
soak: setup-test build ## run the long forms of tests (root; 35 minutes)
	go build -o bin/test-run ./test/run
	bin/test-run soak

FUZZTIME := 10m
.PHONY: fuzz
fuzz: setup-test generate ## run all fuzzers, for FUZZTIME (10m) together (root)
	go build -o bin/test-run ./test/run
	bin/test-run fuzz $(FUZZTIME)

.PHONY: mutants
mutants: setup-test generate ## remove the checks of the threat model, and see its tests fail; ROW="a flood" for one row, FROM="a flood" to begin there (root)
	go build -o bin/mutants ./test/mutants
	bin/mutants -from '$(FROM)' '$(ROW)'

KERNEL :=
.PHONY: kernels
kernels: setup-kernels generate ## test the data path on Debian's kernels, in QEMU (root; half an hour); KERNEL="6.1 arm64" for some
	go build -o bin/kernels ./test/kernels
	bin/kernels $(KERNEL)

.PHONY: lint
lint: setup-lint generate ## check licence lines, format and correctness of C, Go and shell
	go run ./test/spdx
	clang-format-19 --dry-run -Werror $(BPF) $(REPORTER)
	shellcheck $(SCRIPTS)
	@unformatted=$$(gofmt -l cmd internal lab loadshm p4 packaging quiclb research test) && \
		if [ -n "$$unformatted" ]; then echo "not formatted by gofmt:" $$unformatted; exit 1; fi
	go vet ./...
	go -C packaging vet ./...
	go tool staticcheck ./...

.PHONY: format
format: setup-lint ## format C and Go in place, and add licence lines
	go run ./test/spdx -w
	clang-format-19 -i $(BPF) $(REPORTER)
	gofmt -w cmd internal lab loadshm p4 packaging quiclb research test

.PHONY: generate
generate: setup-build $(GENERATED) ## compile the BPF programs and their Go bindings

# setup-build links the compiler. A new link makes the programs be compiled again.
$(BPF2GO_CC): | setup-build

$(GENERATED): $(BPF) $(GENERATORS) $(BPF2GO_CC) go.mod Makefile
	@find cmd internal lab research -name '*_bpfel*' -delete # even those of packages that have moved
	@echo 'build: compiling the programs for the kernel with clang'
	@go generate ./...
	@mkdir -p $(@D) && touch $@

.PHONY: clean
clean: ## remove build results; the tools in .tools stay
	rm -rf bin
	find . -name '*_bpfel*.go' -delete -o -name '*_bpfel*.o' -delete

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } \
		/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup-build setup-demo setup-test setup-kernels setup-modules setup-lint setup-mediawiki
setup-build:
	@$(SETUP) build
setup-demo:
	@$(SETUP) build demo
setup-test:
	@$(SETUP) build demo test modules
setup-kernels:
	@$(SETUP) build kernels
setup-modules:
	@$(SETUP) build modules
setup-lint:
	@$(SETUP) build lint
setup-mediawiki:
	@$(SETUP) build demo mediawiki
