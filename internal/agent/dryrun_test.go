// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
)

// dryRuns are the dry runs of data paths that no later test uses.
var dryRuns = map[*kernel]*dryRun{}

// dryRunOf loads the dry run of a data path when it is first needed. The dry run of a data path that
// tests use one after the other stays with it. testKernelOf closes any other one.
func dryRunOf(t testing.TB, k *kernel) *dryRun {
	t.Helper()
	if d := dryRuns[k]; d != nil {
		return d
	}
	reuse.Lock()
	defer reuse.Unlock()
	r := used[k]
	if r != nil && r.dry != nil {
		return r.dry
	}
	d, err := newDryRun(k.objects.XdpAgent)
	testhost.Must(t, err)
	if r != nil {
		r.dry = d
	} else {
		dryRuns[k] = d
	}
	return d
}

func closeDryRun(k *kernel) error {
	d := dryRuns[k]
	if d == nil {
		return nil
	}
	delete(dryRuns, k)
	return d.close()
}

// tracingView returns a view that traces with the dry run of runAgent.
func tracingView(t testing.TB, k *kernel) *View {
	t.Helper()
	v := k.view()
	v.dry = dryRunOf(t, k)
	return v
}

// runAgent runs the agent's program on a frame, after a dry run on the same frame. The dry run must
// count nothing, and must record what the program then does.
func runAgent(t testing.TB, k *kernel, frame []byte) (verdict uint32, out []byte) {
	t.Helper()
	untouched := countReasons(t, k)
	decision, err := dryRunOf(t, k).decide(frame)
	testhost.Must(t, err)
	reasons, offers := countReasons(t, k), countOffers(t, k, &decision)
	if names := grown(k.labels.reasons, untouched, reasons); names != "" {
		t.Errorf("%s\na dry run counted %s", explain(frame), names)
	}
	verdict, out = run(t, k.objects.XdpAgent, frame)
	got := outcome{
		Verdict: verdict,
		reason:  grown(k.labels.reasons, reasons, countReasons(t, k)),
		offer:   grown(k.labels.offers, offers, countOffers(t, k, &decision)),
	}
	if isSentOn(got.reason) {
		got.next = nextOf(t, k, out)
	}
	if want := recorded(k, &decision); !want.allows(got) {
		t.Errorf("%s\nthe record of the dry run is %+v, the program's outcome %+v", explain(frame), want, got)
	}
	return verdict, out
}

// isSentOn tells whether a packet goes to another host: to the next server, or back to the
// balancer.
func isSentOn(reason string) bool {
	return strings.HasPrefix(reason, "next_") || reason == "return_not_local"
}

// outcome is what a run of the program did, or what the record of a dry run says.
type outcome struct {
	Verdict       uint32
	reason, offer string
	next          netip.Addr // the destination of a packet that is passed on
}

// recorded returns the outcome that a record names.
func recorded(k *kernel, d *agentDecision) outcome {
	o := outcome{Verdict: d.Verdict, reason: k.labels.reasons[d.Reason]}
	if d.IsOffer != 0 {
		o.offer = k.labels.offers[d.Offer]
	}
	if next := netip.AddrFrom16(d.Next.In6U.U6Addr8); !next.IsUnspecified() {
		o.next = next
	}
	return o
}

// allows tells whether the program may do this after the record was made. The rate limit of resets
// is per core, and each millisecond permits one reset more.
func (o outcome) allows(got outcome) bool {
	limited := []string{"drop_rate_limit", "deliver_not_local"}
	if slices.Contains(limited, o.reason) && slices.Contains(limited, got.reason) {
		return true
	}
	return o == got
}

// nextOf has tc forward a frame that the XDP program left for the next segment. It returns the
// destination.
func nextOf(t testing.TB, k *kernel, frame []byte) netip.Addr {
	t.Helper()
	verdict, out := run(t, k.objects.TcForward, frame)
	if verdict != tcRedirect {
		t.Errorf("%s\nthe frame does not leave for the next segment: verdict %d", explain(frame), verdict)
	}
	return netip.AddrFrom16([16]byte(out[14+24:]))
}

// countReasons returns the number of packets by reason, with one system call.
func countReasons(t testing.TB, k *kernel) []uint64 {
	t.Helper()
	cpus := ebpf.MustPossibleCPU()
	keys := make([]uint32, len(k.labels.reasons))
	counters := make([]agentCounter, len(keys)*cpus)
	var cursor ebpf.MapBatchCursor
	_, err := k.objects.Reasons.BatchLookup(&cursor, keys, counters, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // which marks the end
		t.Fatal(err)
	}
	sums := make([]uint64, len(keys))
	for i, c := range counters {
		sums[keys[i/cpus]] += c.Packets
	}
	return sums
}

// countOffers returns the number of offers by result, of the service that a record names. They are
// 0 if it names none.
func countOffers(t testing.TB, k *kernel, d *agentDecision) []uint64 {
	t.Helper()
	sums := make([]uint64, len(k.labels.offers))
	if d.service().Protocol == 0 {
		return sums
	}
	var a agentAcceptance
	var offers agentOffers
	err := k.objects.Acceptances.Lookup(d.service(), &a)
	testhost.Must(t, errors.Join(err, k.objects.Offers.Lookup(a.Number, &offers)))
	return offers.Count[:]
}

// grown returns the labels of the counters that differ.
func grown(labels []string, before, after []uint64) string {
	var names []string
	for i, label := range labels {
		if after[i] != before[i] {
			names = append(names, label)
		}
	}
	return strings.Join(names, ", ")
}

// readAll reads all tables and variables that the agent's program uses.
func readAll(t *testing.T, k *kernel) datapathtest.State {
	t.Helper()
	spec, _, err := loadSpec()
	testhost.Must(t, err)
	maps, err := datapath.MapsOf(k.objects.XdpAgent, spec.Maps)
	testhost.Must(t, err)
	for _, name := range []string{agentMapAgentFlows, agentMapAcceptances, agentMapDeliveredFragments, agentMapResets, ".bss", recordSection} {
		if maps[name] == nil {
			t.Fatalf("the program does not use %s: %v", name, maps)
		}
	}
	s := datapathtest.ReadMaps(t, maps)
	testhost.Must(t, datapath.CloseMaps(maps))
	return s
}

// A dry run leaves every table and every variable as it is, and records what the agent knows about
// the flow. (runAgent compares the decision.)
func TestDryRunChangesNothing(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	sides := [][]situation{s.situations(client4, vip4), s.situations(client6, vip6)}
	s.age(k, vip4, vip6) // so that the load is the same in both runs
	random := rand.New(rand.NewPCG(7, 11))
	seen := map[string]int{}
	long := packet.TCP(client4, vip4, packet.Flags(packet.ACK), packet.Payload(make([]byte, 3000)))
	fragment := packet.Fragments(long, 1440, 7)[0]
	requireNoChange(t, k, asks(desired.SRv6Encap, ackStickiness, fragment))
	for range 60 {
		accept, notLocal := randomRule(random)
		testhost.Must(t, k.write(newTableContent(huntingConfig(desired.SRv6Encap, accept, notLocal), mtu)))
		refill(t, k)
		s.do(func() error {
			for range 5 {
				now := sides[random.IntN(2)][random.IntN(len(sides[0]))]
				state := []string{"", "wait", "direct", "ending", "closing"}[random.IntN(5)]
				e := handshakeEvents()[random.IntN(len(handshakeEvents()))]
				randomLoad(t, k, random, now.vip)
				setFlow(t, k, now.flow, desired.SRv6Encap, state, 5)
				d := requireNoChange(t, k, e.frame(now.dialogue, desired.SRv6Encap))
				requireFlow(t, k, &d, now, state)
				seen[k.labels.reasons[d.Reason]]++
			}
			all := captures()
			for _, frame := range packettest.Mutants(all[random.IntN(len(all))], random.Uint64(), 3, all) {
				d := requireNoChange(t, k, frame)
				seen[k.labels.reasons[d.Reason]]++
			}
			return nil
		})
	}
	for _, reason := range []string{"deliver_srv6_encap", "deliver_not_local", "next_refused", "next_not_local", "drop_not_local"} {
		if seen[reason] == 0 {
			t.Errorf("no packet left as %s: %v", reason, seen)
		}
	}
}

// requireNoChange compares all tables and variables before and after a dry run. Then it runs the
// program itself.
func requireNoChange(t *testing.T, k *kernel, frame []byte) agentDecision {
	t.Helper()
	before := readAll(t, k)
	decision, err := dryRunOf(t, k).decide(frame)
	testhost.Must(t, err)
	before.RequireSame(t, explain(frame), readAll(t, k))
	runAgent(t, k, frame)
	return decision
}

// requireFlow compares what a record says about the flow with what the test has set up.
func requireFlow(t *testing.T, k *kernel, d *agentDecision, now situation, state string) {
	t.Helper()
	got := tracedFlow(d)
	want := TracedFlow{State: "listen", Age: got.Age}
	if state != "" {
		want.State, want.Balancer = state, netip.PrefixFrom(balancer1, 64)
		if got.Age < 4.9 || got.Age > 65 {
			t.Errorf("%s: the entry is %.1f s old, want 5 s and some more", now.name, got.Age)
		}
	}
	socket := map[string]string{
		"down": "none", "listening": "listening", "request": "request", "connected": "established",
		"request, but connected elsewhere": "request", "time wait": "time-wait", "cookie": "listening",
		"closed by the server": "fin-wait-2",
	}[now.name]
	if got != want || socketName(uint32(d.Socket)) != socket || d.HasFlow == 0 {
		t.Errorf("%s: the flow is %+v at socket %s, want %+v at socket %s",
			now.name, got, socketName(uint32(d.Socket)), want, socket)
	}
	service := serviceKey(desired.AgentService{VIP: now.vip.Addr(), Port: desired.Port(now.vip.Port())})
	if d.service() != service {
		t.Errorf("%s: the service is %v, want %v", now.name, d.Service, service)
	}
}

// A program of another build has no dry run, because a dry run of this build could decide
// otherwise.
func TestDryRunOfAnotherBuild(t *testing.T) {
	k := testKernel(t)
	spec, _, err := loadPermitted()
	testhost.Must(t, err)
	program := spec.Programs[agentProgXdpAgent]
	program.Instructions = slices.Insert(program.Instructions, 1, asm.Mov.Imm(asm.R0, 0))
	var other struct {
		Program *ebpf.Program `ebpf:"xdp_agent"`
	}
	testhost.Must(t, spec.LoadAndAssign(&other, nil))
	defer other.Program.Close()
	for name, program := range map[string]*ebpf.Program{
		"other instructions": other.Program, "no constants": k.objects.QuerySocket,
	} {
		if d, err := newDryRun(program); !errors.Is(err, errOtherBuild) {
			t.Errorf("%s: dry run %v, error %v; want %v", name, d, err, errOtherBuild)
		}
	}
}
