// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/version"
)

// The worker protocol. A comparison of two builds (Compare) starts a worker process of each build,
// `segue-lab bench worker`. Both sides send JSON objects over pipes, one object in each line. The
// worker first sends a hello. Then it answers one request after the other. Before the answer, it
// may send lines of progress. When its input ends, it removes everything that it has loaded, and
// ends.

// workerProtocol is the version of the protocol. It must change when builds from before and after a
// change of the protocol could misread each other's requests or answers.
const workerProtocol = 1

// workerArguments are the command-line arguments of a worker.
var workerArguments = []string{"bench", "worker"}

// hello is the first line that a worker sends.
type hello struct {
	// Protocol is workerProtocol. By its key in JSON, a comparison recognises a worker among
	// programs that write JSON.
	Protocol int           `json:"segue_bench_worker"`
	Build    version.Build `json:"build"`
}

// request is a request to a worker. Exactly one of its fields is set.
type request struct {
	Prepare *prepareRequest `json:"prepare,omitempty"`
	Run     *runRequest     `json:"run,omitempty"`
}

// prepareRequest asks the worker to build the tables and programs of cases. It is the first
// request, and is sent only once. Flows and Room are those of PacketOptions.
type prepareRequest struct {
	Flows []uint32 `json:"flows"`
	Room  uint32   `json:"room"`
	Case  string   `json:"case"` // a regular expression for names; "": base cases and isDataPath
}

// runRequest asks for one measurement of a case.
type runRequest struct {
	Case    int    `json:"case"` // the index of the case in the answer to prepareRequest
	Packets uint32 `json:"packets"`
}

// answer is a line that a worker sends after its hello.
type answer struct {
	Progress string       `json:"progress,omitempty"` // if it is set, this is not the answer yet
	Error    string       `json:"error,omitempty"`    // why the request failed
	Cases    []workerCase `json:"cases,omitempty"`    // in the answer to prepareRequest
	Cost     *workerCost  `json:"cost,omitempty"`     // in the answer to runRequest
}

// CaseName identifies a case in both builds.
type CaseName struct {
	Case          string                `json:"case"`
	Family        string                `json:"family"`
	Encapsulation desired.Encapsulation `json:"encapsulation"`
	Flows         uint32                `json:"flows"`
}

// String returns the name in words.
func (n CaseName) String() string {
	words := []string{n.Case, n.Family}
	if n.Encapsulation != "" {
		words = append(words, string(n.Encapsulation))
	}
	return fmt.Sprintf("%s, %d flows", strings.Join(words, ", "), n.Flows)
}

// isBase does the same as benchCase.isBase.
func (n CaseName) isBase() bool { return n.Case == caseNull || n.Case == caseFloor }

// workerCase is a case that a worker has prepared.
type workerCase struct {
	CaseName
	Program programIdentity `json:"program"`
}

// programIdentity identifies the instructions of a program. It is equal for two programs with the
// same instructions.
type programIdentity struct {
	// Instructions is the number of instructions, without those that the kernel has removed because
	// they are unreachable.
	Instructions int `json:"instructions"`
	// Tag is the kernel's digest of all instructions as they were loaded (bpf_prog_info.tag).
	Tag string `json:"tag"`
}

// workerCost is the cost per packet in one measurement.
type workerCost struct {
	Nanoseconds  float64 `json:"ns"`           // of CPU time
	Instructions float64 `json:"instructions"` // executed; 0 if the processor does not count them
}

// worker measures cases of this build, on request of another process.
type worker struct {
	host  *host
	rigs  map[setup]*rig
	cases []*measured
	out   *json.Encoder
}

// ServeWorker answers the requests of a comparison of builds until the input ends. If a request
// fails, the answer has the error. ServeWorker itself returns an error if it cannot read a request
// or write an answer, if too many packets were not of the kind that their case measures, or if
// something cannot be removed.
func ServeWorker(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	w := &worker{rigs: map[setup]*rig{}, out: json.NewEncoder(out)}
	if err := w.out.Encode(hello{workerProtocol, version.Read()}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	requests := json.NewDecoder(in)
	for {
		var r request
		err := requests.Decode(&r)
		if errors.Is(err, io.EOF) {
			return w.check()
		}
		if err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		reply, err := w.handle(ctx, &r)
		if err != nil {
			reply = answer{Error: err.Error()}
		}
		if err := w.out.Encode(reply); err != nil {
			return err
		}
	}
}

// handle returns the answer to a request.
func (w *worker) handle(ctx context.Context, r *request) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, err
	}
	switch {
	case r.Prepare != nil:
		return w.prepare(ctx, r.Prepare)
	case r.Run != nil:
		return w.run(r.Run)
	}
	return answer{}, errors.New("a request of no known kind")
}

// prepare builds the tables and programs of the requested cases.
func (w *worker) prepare(ctx context.Context, r *prepareRequest) (a answer, err error) {
	if w.host != nil {
		return a, errors.New("the cases are prepared already")
	}
	chosen, err := r.chooseCases()
	if err != nil {
		return a, err
	}
	if w.host, err = newHost(); err != nil {
		return a, err
	}
	progress := func(what string) { _ = w.out.Encode(answer{Progress: what}) }
	if w.cases, err = prepareCases(ctx, w.host, w.rigs, chosen, progress); err != nil {
		return a, err
	}
	for _, m := range w.cases {
		c := workerCase{CaseName: m.caseName()}
		if c.Program, err = identify(m.programMeasured(w.host)); err != nil {
			return a, m.explain(err)
		}
		a.Cases = append(a.Cases, c)
	}
	return a, nil
}

// chooseCases returns the requested cases.
func (r *prepareRequest) chooseCases() ([]benchCase, error) {
	o := PacketOptions{Flows: r.Flows, Room: r.Room}
	if r.Case != "" {
		expression, err := regexp.Compile(r.Case)
		if err != nil {
			return nil, err
		}
		o.Case = expression
		return o.chooseCases()
	}
	var chosen []benchCase
	for _, c := range allCases(o.Flows, o.Room) {
		if c.isBase() || c.isDataPath() {
			chosen = append(chosen, c)
		}
	}
	return chosen, nil
}

// isDataPath tells whether the case measures a whole program of a balancer or agent: not a program
// that ends after a step, and not the reference program.
func (c *benchCase) isDataPath() bool {
	return (c.setup.kind == setupBalancer || c.setup.kind == setupAgent) && c.step == ""
}

func (c *benchCase) caseName() CaseName {
	return CaseName{c.name, string(c.family), c.encapsulation, c.flows}
}

// programMeasured returns the program under test, or the host program if there is none.
func (m *measured) programMeasured(h *host) *ebpf.Program {
	if m.program == nil {
		return h.objects.XdpHost
	}
	return m.program
}

func identify(program *ebpf.Program) (id programIdentity, err error) {
	info, err := program.Info()
	if err != nil {
		return id, err
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return id, err
	}
	const instructionSize = 8
	return programIdentity{size / instructionSize, info.Tag}, nil
}

func (w *worker) run(r *runRequest) (a answer, err error) {
	if r.Case < 0 || r.Case >= len(w.cases) {
		return a, fmt.Errorf("case %d: there are %d", r.Case, len(w.cases))
	}
	if r.Packets == 0 {
		return a, errors.New("no packets to measure")
	}
	m := w.cases[r.Case]
	if err := m.round(w.host, r.Packets); err != nil {
		return a, m.explain(err)
	}
	last := len(m.times) - 1
	a.Cost = &workerCost{m.times[last], m.instructions[last]}
	return a, nil
}

// check returns an error if too many packets were not of the kind that their case measures. It
// skips cases that were not measured.
func (w *worker) check() error {
	for _, m := range w.cases {
		if m.sent == 0 {
			continue
		}
		if err := m.requireCounted(); err != nil {
			return m.explain(err)
		}
	}
	return nil
}

func (w *worker) close() (err error) {
	for _, r := range w.rigs {
		err = errors.Join(err, r.close())
	}
	if w.host != nil {
		err = errors.Join(err, w.host.close())
	}
	return err
}
