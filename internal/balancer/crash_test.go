// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// The environment variables of a process that is to be killed.
const (
	crashInstance = "SEGUE_TEST_CRASH_INSTANCE"
	crashCall     = "SEGUE_TEST_CRASH_CALL"  // the number of the system call that kills it
	crashFirst    = "SEGUE_TEST_CRASH_FIRST" // its first configuration, 0 or 1
	// The node.inside of the process: eth0, eth1 or empty. The other one is node.interface.
	crashInside = "SEGUE_TEST_CRASH_INSIDE"
)

func TestMain(m *testing.M) {
	if instance := os.Getenv(crashInstance); instance != "" {
		narrowed.Store(instance, nil) // the verifier needs much longer for programs with all features
		do := crash
		if os.Getenv(crashFails) != "" {
			do = failStart
		}
		if err := do(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// The tests make much garbage, and keep little of it.
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// startOnly stands for the number of the call in a process that is not to be killed, and does not
// reload.
const startOnly = -1

// crash is the process that is to be killed. It starts a balancer and reloads another
// configuration. If it is not killed, it ends without cleaning up.
func crash() error {
	call, err := strconv.Atoi(os.Getenv(crashCall))
	if err != nil {
		return err
	}
	if call != startOnly {
		if err := datapathtest.KillBefore(call); err != nil {
			return err
		}
	}
	b, _, err := startCrash(context.Background())
	if err != nil || call == startOnly {
		return err
	}
	cfg, err := crashConfigOf(1)
	if err != nil {
		return err
	}
	return b.Reload(context.Background(), cfg, desired.Secrets{})
}

// startCrash starts a balancer with the first configuration of this process. The channel has the
// result of Run.
func startCrash(ctx context.Context) (b *Balancer, ended <-chan error, err error) {
	cfg, err := crashConfigOf(0)
	if err != nil {
		return nil, nil, err
	}
	if b, err = New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler)); err != nil {
		return nil, nil, err
	}
	result := make(chan error, 1)
	go func() { result <- b.Run(ctx) }()
	select {
	case err := <-result:
		return nil, nil, errors.Join(err, b.Close())
	case <-b.Ready():
		return b, result, nil
	}
}

// crashConfigOf returns the nth configuration of this process, counted from 0.
func crashConfigOf(n int) (*desired.Balancer, error) {
	first, err := strconv.Atoi(os.Getenv(crashFirst))
	if err != nil {
		return nil, err
	}
	cfg := crashConfig(os.Getenv(crashInstance), (first+n)%2)
	if cfg.Node.Inside = os.Getenv(crashInside); cfg.Node.Inside == "eth0" {
		cfg.Node.Interface = "eth1"
	}
	return cfg, nil
}

// The services of the crash test. The service "web" has one of two ports, and its servers come, go
// and change their weight. The service "moving" has the one port or the other.
var (
	staying = web
	moving  = [2]dataplane.Flow{flowTo(vip6, 8080, desired.TCP), flowTo(vip6, 8081, desired.TCP)}
)

// crashConfig returns one of two configurations, which have the numbers 0 and 1.
func crashConfig(instance string, number int) *desired.Balancer {
	servers := [2][]desired.Server{
		{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)},
		{srv6Server("s4", 4, 1), srv6Server("s2", 2, 3), srv6Server("s1", 1, 1)},
	}[number]
	cfg := balancerOf(
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...),
		serviceOf("moving", vip6, desired.Port(moving[number].Destination.Port()), desired.TCP, desired.SRv6Encap, servers...),
		serviceOf(fmt.Sprint("only", number), vip4, 80, desired.TCP, desired.SRv6Encap, servers[0]),
		inferring(append(servers, [2][]desired.Server{nil, manyServers(20)[9:]}[number]...)...).Services[0],
		inferring(servers...).Services[0],
	)
	cfg.Services[3].Name, cfg.Services[3].Port = "inferring", 8082
	cfg.Services[4].Name, cfg.Services[4].Port = "sometimes", 8083
	if number == 0 {
		cfg.Services[4].Placement, cfg.Services[4].Infer = desired.PlacementHash, nil
	}
	cfg.Services[1].Buckets = []int{251, 31}[number]
	cfg.Node.Instance, cfg.Node.Limits.Flows, cfg.Node.Limits.Servers = instance, 1<<14, 512
	return cfg
}

// crashSite is the network and the instance in which processes are killed.
type crashSite struct {
	t        *testing.T
	ns       *testhost.Namespace
	instance string
	// inside contains the node.inside of the processes, which use the two elements in turn.
	inside [2]string
	known  map[dataplane.Flow][]byte // packets of established flows, as sent to the server
	fresh  uint16                    // the client port of the next new connection
}

func newCrashSite(t *testing.T, inside [2]string) *crashSite {
	t.Helper()
	testhost.NeedBPF(t)
	s := &crashSite{t: t, ns: testhost.NewNamespace(t), inside: inside, instance: fmt.Sprintf("test-%d-%d", os.Getpid(), instances.Add(1)), fresh: 20000}
	router := testhost.NewNamespace(t)
	testhost.Connect(t, s.ns, "eth0", testhost.Prefixes("fd00:a::1/64"),
		router, "eth0", testhost.Prefixes("fd00:a::2/64"))
	testhost.Connect(t, s.ns, "eth1", nil, testhost.NewNamespace(t), "eth0", nil)
	s.must(s.ns.Do(func() error {
		for _, name := range []string{"eth1", "eth0"} {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetHardwareAddr(link, ownMAC[:]); err != nil {
				return err
			}
		}
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		_, locators, _ := net.ParseCIDR("fd00:5::/32")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: locators, Gw: net.ParseIP("fd00:a::2")})
	}))
	t.Cleanup(func() { s.must(dataplane.Detach(s.instance)) })
	return s
}

func (s *crashSite) must(err error) {
	s.t.Helper()
	testhost.Must(s.t, err)
}

// run starts a process with the configuration, and kills it in place of its nth system call. It
// tells whether the process made that many calls.
func (s *crashSite) run(first, call int) (killed bool) {
	s.t.Helper()
	var output bytes.Buffer
	cmd := exec.CommandContext(s.t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashInstance+"="+s.instance,
		crashFirst+"="+strconv.Itoa(first), crashCall+"="+strconv.Itoa(call), crashInside+"="+s.inside[first])
	cmd.Stdout, cmd.Stderr = &output, &output
	s.must(s.ns.Do(cmd.Start))
	err := cmd.Wait()
	if err == nil {
		return false
	}
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL || s.t.Context().Err() != nil {
		s.t.Fatalf("to be killed before call %d: %v: %s", call, err, &output)
	}
	return true
}

// interfaces lists the interfaces that all processes use.
func (s *crashSite) interfaces() []string {
	if slices.Contains(s.inside[:], "") {
		return []string{"eth0"}
	}
	return []string{"eth0", "eth1"}
}

// programs returns the attached programs by interface, and the program that is pinned for tools.
// Before the first process has attached its programs, there are none.
func (s *crashSite) programs() (programs map[string]*ebpf.Program) {
	s.t.Helper()
	var held []ebpf.ProgramID
	for _, pin := range []string{datapath.LinkPin, datapath.InsidePin} {
		l, err := link.LoadPinnedLink(filepath.Join(datapath.Dir(s.instance), pin), nil)
		if errors.Is(err, os.ErrNotExist) && pin == datapath.InsidePin {
			continue
		}
		s.must(err)
		info, err := l.Info()
		s.must(errors.Join(err, l.Close()))
		held = append(held, info.Program)
	}
	programs = map[string]*ebpf.Program{}
	s.must(s.ns.Do(func() error {
		for _, name := range s.interfaces() {
			device, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			xdp := device.Attrs().Xdp
			if xdp == nil || !slices.Contains(held, ebpf.ProgramID(xdp.ProgId)) {
				return fmt.Errorf("%s runs %+v, and the programs of pinned links are %d", name, xdp, held)
			}
			if programs[name], err = ebpf.NewProgramFromID(ebpf.ProgramID(xdp.ProgId)); err != nil {
				return err
			}
		}
		return nil
	}))
	pinned, err := ebpf.LoadPinnedProgram(filepath.Join(datapath.Dir(s.instance), datapath.BalancerProgram), nil)
	s.must(err)
	programs["pin"] = pinned
	return programs
}

func (s *crashSite) send(program *ebpf.Program, frame []byte) (verdict uint32, out []byte) {
	s.t.Helper()
	options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 256)}
	verdict, err := program.Run(&options)
	s.must(err)
	return verdict, options.DataOut
}

// check sends packets of known flows and of new ones. All must reach the right server.
func (s *crashSite) check(when string) {
	s.t.Helper()
	for which, program := range s.programs() {
		for flow, want := range s.known {
			verdict, out := s.send(program, frameOf(flow, packet.Flags(packet.ACK)))
			if verdict != verdictRedirect || !bytes.Equal(out, want) {
				s.t.Errorf("%s: program of %s: %v: verdict %d, %x, want %x", when, which, flow.Source, verdict, out, want)
			}
		}
		served := false
		for _, to := range []dataplane.Flow{staying, moving[0], moving[1]} {
			for range 8 {
				s.fresh++
				verdict, _ := s.send(program, frameOf(fromPort(to, s.fresh)))
				served = served || to != staying && verdict == verdictRedirect
				if to == staying && verdict != verdictRedirect {
					s.t.Errorf("%s: program of %s: new connection to %v: verdict %d", when, which, to.Destination, verdict)
				}
			}
		}
		if !served {
			s.t.Errorf("%s: program of %s: the service that moves is in neither place", when, which)
		}
		_ = program.Close()
	}
}

// remember establishes flows, and stores those whose server is in both configurations.
func (s *crashSite) remember() {
	s.t.Helper()
	programs := s.programs()
	program := programs["eth0"]
	s.known = map[dataplane.Flow][]byte{}
	for port := range uint16(liveFlows) {
		flow := fromPort(staying, 10000+port)
		s.send(program, frameOf(flow))
		verdict, out := s.send(program, frameOf(flow, packet.Flags(packet.ACK)))
		if verdict != verdictRedirect {
			s.t.Fatalf("%v: verdict %d", flow, verdict)
		}
		// The outer destination address follows the Ethernet header and 24 bytes of the IPv6
		// header.
		server := out[14+24+7]
		if server == 1 || server == 2 {
			s.known[flow] = out
		}
	}
	if len(s.known) < liveFlows/4 {
		s.t.Fatalf("only %d flows are at servers that stay", len(s.known))
	}
}

// checkSides sends packets that only come from the inside. An interface that leads to the outside
// must drop them. A balancer with one interface must have no program on any other.
func (s *crashSite) checkSides(number int) {
	s.t.Helper()
	if s.inside[number] == "" {
		s.must(s.otherRuns())
		return
	}
	for name, program := range s.programs() {
		want := uint32(verdictDrop)
		if name == s.inside[number] {
			want = verdictPass
		}
		if verdict, _ := s.send(program, intrusions()["SID of a server"].frame); verdict != want {
			s.t.Errorf("%s is inside: program of %s: verdict %d for a SID, want %d", s.inside[number], name, verdict, want)
		}
		_ = program.Close()
	}
}

// otherRuns returns an error if eth1 runs a program.
func (s *crashSite) otherRuns() error {
	return s.ns.Do(func() error {
		eth1, err := netlink.LinkByName("eth1")
		if err == nil && eth1.Attrs().Xdp != nil && eth1.Attrs().Xdp.Attached {
			err = fmt.Errorf("eth1 runs %+v", eth1.Attrs().Xdp)
		}
		return err
	})
}

// awaitDetached waits until eth1 runs no program, if the balancer has one interface. It is for a
// start that took over although a call failed. If that call was to detach the link of eth1, the
// kernel detaches the program only after the pin of the link is removed, and some time after.
func (s *crashSite) awaitDetached(number int) {
	s.t.Helper()
	if s.inside[number] == "" {
		testhost.Eventually(s.t, s.otherRuns)
	}
}

// TestKilledAtEveryStep starts processes over a data path that is in use, and kills each process
// before a system call that changes something. The calls are 31 apart, from a random one on, so
// that several runs of the test reach every call. The data path must keep working. The next process
// has the other configuration, is killed as well, and must cope with the state that the one before
// has left. With -crashes 3, more than 20 processes are killed.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	killAtSteps(t, datapathtest.Apart(31), [2]string{})
}

// TestKilledWithTwoInterfaces kills processes that exchange the roles of their two interfaces, or
// whose second interface comes and goes.
func TestKilledWithTwoInterfaces(t *testing.T) {
	t.Parallel()
	for _, inside := range [][2]string{{"eth1", "eth0"}, {"eth1", ""}} {
		t.Run(fmt.Sprintf("%q", inside), func(t *testing.T) {
			t.Parallel()
			killAtSteps(t, datapathtest.Apart(67), inside)
		})
	}
}

// killAtSteps kills processes before system calls, while packets come. The numbers of the calls are
// step apart.
func killAtSteps(t *testing.T, step int, inside [2]string) {
	s := newCrashSite(t, inside)
	if s.run(1, 0) {
		t.Fatal("the first process was killed")
	}
	s.remember()
	call := rand.IntN(step) - step + 1
	kills := 0
	for survived := 0; survived < 2; { // until both configurations have survived
		call += step
		end := s.traffic()
		if s.run(call%2, call) {
			survived = 0
			kills++
		} else {
			survived++
			s.checkSides(call % 2)
		}
		end()
		s.checkLoads(fmt.Sprintf("killed before call %d", call))
		s.check(fmt.Sprintf("killed before call %d", call))
		if t.Failed() {
			t.FailNow()
		}
	}
	if call < 30 {
		t.Errorf("a process makes %d calls; there must be more", call)
	}
	if diff := cmp.Diff(newCrashSite(t, inside).settled(), s.settled()); diff != "" {
		t.Errorf("what is left after all, other than after one start (-want +got):\n%s", diff)
	}
	s.sweepAll()
	t.Logf("%d processes were killed", kills)
}

// traffic sends packets of random flows to services that infer, until the returned function is
// called.
func (s *crashSite) traffic() (end func()) {
	s.t.Helper()
	program := s.programs()["pin"]
	flags := []packet.TCPFlags{packet.SYN, packet.SYN, packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST}
	done, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-done:
				ended <- program.Close()
				return
			default:
			}
			to := flowTo(vip6, 8082+uint16(rand.IntN(2)), desired.TCP)
			frame := frameOf(fromPort(to, 40000+uint16(rand.IntN(256))), packet.Flags(flags[rand.IntN(len(flags))]))
			if _, err := program.Run(&ebpf.RunOptions{Data: frame}); err != nil {
				ended <- errors.Join(err, program.Close())
				return
			}
			time.Sleep(100 * time.Microsecond) // leaves the core to the process that starts
		}
	}()
	return func() {
		s.t.Helper()
		close(done)
		s.must(<-ended)
	}
}

// checkLoads requires that the load of each server equals its entries of the pinned tables. It
// returns the number of flows that count.
func (s *crashSite) checkLoads(when string) (flows int) {
	s.t.Helper()
	loads, size := s.words("loads")
	var tables [][]uint64
	for _, name := range []string{"flows", "half_open", "observed"} {
		entries, _ := s.words(name)
		tables = append(tables, entries)
	}
	for slot, want := range loadsOf(uint32(len(loads)/size), tables...) {
		confirmed, counts := loads[slot*size], loads[slot*size+1]
		established, answered := uint32(confirmed), uint32(confirmed>>32)
		placed, lost := uint32(counts), uint32(counts>>32)
		if got := (load{placed - answered - lost, established}); got != want {
			s.t.Errorf("%s: slot %d: the load is %+v, the entries are %+v", when, slot, got, want)
		}
		flows += int(want.unconfirmed + want.established)
	}
	return flows
}

// words returns the values of a pinned array, as words, and how many words a value has.
func (s *crashSite) words(name string) (words []uint64, size int) {
	s.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(datapath.Dir(s.instance), name), nil)
	s.must(err)
	defer m.Close()
	value := make([]byte, m.ValueSize())
	for i := range m.MaxEntries() {
		s.must(m.Lookup(i, value))
		for at := 0; at+8 <= len(value); at += 8 {
			words = append(words, binary.LittleEndian.Uint64(value[at:]))
		}
	}
	return words, len(value) / 8
}

// sweepAll frees all entries. No load may be left.
func (s *crashSite) sweepAll() {
	s.t.Helper()
	if s.checkLoads("before the sweep") == 0 {
		s.t.Error("no flows are left to sweep")
	}
	s.must(s.ns.Do(func() error {
		b, err := New(crashConfig(s.instance, 0), desired.Secrets{}, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		_, err = b.plane.Sweeper.Sweep(nobody)
		return errors.Join(err, b.Close())
	}))
	if flows := s.checkLoads("after the sweep"); flows != 0 {
		s.t.Errorf("%d flows are left after the sweep", flows)
	}
}

// settled describes the services as segue status shows them, once a process has settled. The last
// process only starts: a start waits for the next hops of the servers, and a reload does not.
func (s *crashSite) settled() (services map[string][]string) {
	s.t.Helper()
	s.run(0, 0)
	s.run(1, startOnly)
	view, err := inspect.OpenView(s.instance)
	s.must(err)
	defer view.Close()
	state, err := view.Snapshot()
	s.must(err)
	services = map[string][]string{}
	for _, service := range state.Services {
		name := fmt.Sprintf("%s %s %d, %d buckets", service.Name, service.VIP, service.Port, service.Buckets)
		for _, server := range service.Servers {
			condition := server.Condition
			switch condition {
			case inspect.ServerRemoved: // not yet swept
				continue
			case inspect.ServerUnresolved: // the process may have been killed first
				condition = inspect.ServerUnchecked
			}
			services[name] = append(services[name], fmt.Sprintf("%s %s %s %v", server.Name, server.Address, condition, server.Share))
		}
		slices.Sort(services[name])
	}
	return services
}

// TestFirstStartKilledAtEveryStep kills the very first process. The next process must forward
// packets, on the same interfaces or with their roles exchanged.
func TestFirstStartKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	for inside, step := range map[[2]string]int{{}: 40, {"eth1", "eth0"}: 80} {
		t.Run(fmt.Sprintf("%q", inside), func(t *testing.T) {
			t.Parallel()
			s, step := newCrashSite(t, inside), datapathtest.Apart(step)
			killed := true
			for call := 1 + rand.IntN(step); killed; call += step {
				killed = s.run(1, call)
				s.run(0, 0)
				s.check(fmt.Sprintf("the first process was killed before call %d", call))
				s.checkSides(0)
				if t.Failed() {
					t.FailNow()
				}
				s.must(dataplane.Detach(s.instance))
			}
		})
	}
}
