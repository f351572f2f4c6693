// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/lab/pktgen"
)

var (
	floodTime = flag.Duration("flood", 3*time.Second, "how long the flood of SYNs lasts at least")
	floodRate = flag.Float64("flood.rate", 20_000, "SYNs per second of the flood; 0: as many as the machine can")
	floodSYNs = flag.Uint64("flood.syns", 60_000, "SYNs of TestSYNFloodOfAServiceThatHunts at least")
)

// spoofed are the source addresses of the flood. No host of the lab has any of these addresses.
var spoofed = netip.MustParsePrefix("2001:db8:bad::/64")

// floodedFlows is the value of node.limits.flows on the balancers. Their flow tables have twice as
// many entries.
const floodedFlows = 1024

// TestSYNFlood sends SYNs from spoofed sources through the edge router to both balancers, and on to
// the servers. It sends many times more SYNs than the flow tables have entries. Meanwhile
// connections continue and new ones open, nothing is reset, and memory does not grow.
//
// The generator takes the place of the edge router's link to the clients: its packets are received
// on that link. It shares the machine's cores with everything after it: router, switch, balancers,
// servers and clients. A flood that leaves no core idle fills the queues between them (256 frames
// of a veth, 1000 packets of a CPU). The lab then loses packets of all senders, which is not the
// balancer's fault. The test reports the losses of each queue. At the default rate, two cores lose
// few packets or none, mostly of the servers' answers to the flood. With -flood.rate=0 the flood is
// far larger than the lab can process. TCP retransmits the lost packets.
//
// The servers answer with SYN cookies, Linux's default (net.ipv4.tcp_syncookies), when the flood
// has filled their queues.
func TestSYNFlood(t *testing.T) {
	t.Parallel()
	l := up(t, topology(mixed...))
	shrinkFlowTables(t, l)
	// Drop the servers' answers to the flood without an ICMP error.
	command(t, l, "edge", "ip", "route", "add", "blackhole", spoofed.String())
	live := openResting(t, l, 150, longestThink, l.Topology.Services...)
	visitors := startVisitors(t, l, 4, l.Topology.Services...)
	live.rounds(t, 1)
	before := takeStock(t, l)

	flood := startFlood(t, l, service(t, l, "http6-insert").Address())
	rounds := 0
	for start := time.Now(); time.Since(start) < *floodTime || !isFlooded(t, l, before); rounds++ {
		live.rounds(t, 1)
		visitors.more(t, 10)
		requireBounded(t, l)
		flood.requireRunning(t)
	}
	sent := flood.stop(t)
	live.rounds(t, 1)
	live.requireUnbroken(t)
	visitors.requireContent(t)
	after := takeStock(t, l)
	t.Logf("%d SYNs, %.0f a second; %d rounds of requests on %d connections, %d new ones; %d segments sent again; "+
		"the lab's own queues lost %v; memory before %+v, after %+v",
		sent.Sent, sent.Rate(), rounds, len(live.connections), visitors.answered.Load(), after.resent-before.resent,
		after.lost(t, before), before.memory, after.memory)

	if n := after.resets - before.resets; n > 0 {
		t.Errorf("%d connections were reset", n)
	}
	requireNoDrops(t, l)
	requireFlooded(t, l, before, sent.Sent)
	requireSameMemory(t, before, after)
}

// requireSameMemory fails the test if balancers have used more memory during a flood. The garbage
// of their processes may grow a little.
func requireSameMemory(t *testing.T, before, after stock) {
	t.Helper()
	for node, memory := range after.memory {
		if was := before.memory[node]; memory.kernel != was.kernel || memory.process > was.process+8<<20 {
			t.Errorf("memory of %s: %+v before the flood, %+v after", node, was, memory)
		}
	}
}

// TestSYNFloodOfAServiceThatHunts sends many SYNs from spoofed sources to servers that answer each
// of them. None of these SYNs becomes a flow of the balancers. At the end their tables
// contain exactly the connections from before. Meanwhile connections continue and new ones open.
// TestSYNFlood describes the losses in the lab itself.
func TestSYNFloodOfAServiceThatHunts(t *testing.T) {
	t.Parallel()
	const connections = 150
	l := up(t, hunting(huntingServices(2)...))
	command(t, l, "edge", "ip", "route", "add", "blackhole", spoofed.String())
	live := openResting(t, l, connections, longestThink, l.Topology.Services...)
	live.rounds(t, 1)
	requireEstablished(t, l, connections)
	before := takeStock(t, l)
	visitors := startVisitors(t, l, 1, l.Topology.Services...)
	flood := startFlood(t, l, l.Topology.Services[0].Address())
	offered := func() (n uint64) {
		for _, name := range nodes(l, lab.RoleBalancer) {
			n += packetCounts(t, l.Node(name)).since(t, before.counts[name])["forward_hunt"]
		}
		return n
	}
	rounds := 0
	for ; offered() < *floodSYNs+uint64(visitors.answered.Load()); rounds++ {
		live.rounds(t, 1)
		visitors.more(t, 10)
		flood.requireRunning(t)
	}
	sent := flood.stop(t)
	live.rounds(t, 1)
	live.requireUnbroken(t)
	visitors.requireContent(t)
	after := takeStock(t, l)
	visitors.stop() // visitors may leave during an answer, with a reset
	t.Logf("%d SYNs, %.0f a second; %d rounds of requests on %d connections, %d new ones; %d segments sent again; "+
		"the lab's own queues lost %v", sent.Sent, sent.Rate(), rounds, connections, visitors.answered.Load(),
		after.resent-before.resent, after.lost(t, before))
	if sent.Sent < *floodSYNs {
		t.Errorf("the flood had %d SYNs", sent.Sent)
	}
	requireEstablished(t, l, connections)
	if n := after.resets - before.resets; n > 0 {
		t.Errorf("%d connections were reset", n)
	}
	requireNoDrops(t, l)
}

// requireEstablished fails the test unless the flow tables have n established flows. The entries of
// connections that have just been closed must expire first.
func requireEstablished(t *testing.T, l *lab.Lab, n uint64) {
	t.Helper()
	start := time.Now()
	eventually(t, func() error {
		var flows dataplane.FlowCounts
		for _, name := range nodes(l, lab.RoleBalancer) {
			counted, err := countedSince(t, l.Node(name), start)
			if err != nil {
				return err
			}
			flows.New += counted.New
			flows.Established += counted.Established
		}
		if flows.Established != n || flows.New > 0 {
			return fmt.Errorf("the flow tables have %d established flows and %d new ones, want %d and none", flows.Established, flows.New, n)
		}
		return nil
	})
}

// shrinkFlowTables restarts the balancers with small tables.
func shrinkFlowTables(t *testing.T, l *lab.Lab) {
	t.Helper()
	restartAnew(t, l, func(cfg *desired.Balancer) { cfg.Node.Limits.Flows = floodedFlows })
}

// flood is a running flood.
type flood struct {
	cancel context.CancelFunc
	result pktgen.Result
	done   chan struct{}
	err    error
}

// startFlood sends SYNs to an address, as if they arrived on the edge router's link to the clients.
func startFlood(t *testing.T, l *lab.Lab, to netip.AddrPort) *flood {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	f := &flood{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		f.err = l.Node("edge").Do(func() (err error) {
			f.result, err = sendFlood(ctx, to)
			return err
		})
	}()
	t.Cleanup(func() { f.cancel(); <-f.done })
	return f
}

// requireRunning fails the test if the flood has ended by itself.
func (f *flood) requireRunning(t *testing.T) {
	t.Helper()
	select {
	case <-f.done:
		t.Fatalf("the flood ended: %v", f.err)
	default:
	}
}

// stop ends the flood and returns its result.
func (f *flood) stop(t *testing.T) pktgen.Result {
	t.Helper()
	f.cancel()
	<-f.done
	must(t, f.err)
	return f.result
}

func sendFlood(ctx context.Context, to netip.AddrPort) (pktgen.Result, error) {
	downlink, err := netlink.LinkByName("eth1")
	if err != nil {
		return pktgen.Result{}, err
	}
	g, err := pktgen.New(pktgen.Config{
		Kind: pktgen.SYN, Sources: spoofed, Destination: to,
		SourceMAC: packet.MAC{2, 0, 0, 0, 0, 1}, DestinationMAC: packet.MAC(downlink.Attrs().HardwareAddr),
		Interface: downlink.Attrs().Index, Receive: true, Rate: *floodRate, Batch: 32, CPU: -1,
	})
	if err != nil {
		return pktgen.Result{}, err
	}
	defer g.Close()
	return g.Run(ctx)
}

// stock is the state that a flood may change.
type stock struct {
	overflows counts // packets that the lab's queues lost, by queue
	resent    uint64 // segments that the client has retransmitted
	resets    uint64 // connections of the client that were reset
	counts    map[string]counts
	memory    map[string]memory
}

// memory is the memory of a balancer, in bytes.
type memory struct {
	process uint64 // resident memory of the process
	kernel  uint64 // memory of all maps
}

// lost returns the losses of the lab's queues since before.
func (s stock) lost(t *testing.T, before stock) counts {
	return s.overflows.since(t, before.overflows)
}

func takeStock(t *testing.T, l *lab.Lab) stock {
	t.Helper()
	s := stock{overflows: linkOverflows(t, l), counts: map[string]counts{}, memory: map[string]memory{}}
	addBacklogOverflows(t, s.overflows)
	s.resent = tcpCounter(t, l.Node("client"), "RetransSegs")
	s.resets = tcpCounter(t, l.Node("client"), "EstabResets")
	for _, name := range nodes(l, lab.RoleBalancer) {
		s.counts[name] = packetCounts(t, l.Node(name))
		s.memory[name] = memory{processMemory(t, l.Process(name, "lb")), mapMemory(t, l.Node(name).Instance())}
	}
	return s
}

// queueFull matches a veth's counters of frames that found a queue full.
var queueFull = regexp.MustCompile(`(\w+_(?:drops|xdp_tx_errors|xdp_xmit_errors)): (\d+)`)

// linkOverflows returns the losses of a lab's links.
func linkOverflows(t *testing.T, l *lab.Lab) counts {
	t.Helper()
	overflows := counts{}
	for _, n := range l.Nodes {
		addLinkOverflows(t, n, overflows)
	}
	return overflows
}

// addLinkOverflows adds the losses of a node's links.
func addLinkOverflows(t *testing.T, n *lab.Node, overflows counts) {
	t.Helper()
	var links []netlink.Link
	must(t, n.Do(func() (err error) {
		links, err = netlink.LinkList()
		return err
	}))
	for _, l := range links {
		if l.Type() != "veth" {
			continue
		}
		name := n.Name + " " + l.Attrs().Name
		overflows[name+" tx_dropped"] = l.Attrs().Statistics.TxDropped
		out, err := n.Run(t.Context(), "ethtool", "-S", l.Attrs().Name)
		must(t, err)
		for _, match := range queueFull.FindAllStringSubmatch(out, -1) {
			// These frames were dropped by the verdict of a program.
			if !strings.HasSuffix(match[1], "_xdp_drops") {
				overflows[name+" "+match[1]] = parseNumber(t, match[2], 10)
			}
		}
	}
}

// addBacklogOverflows adds the packets that found a CPU's queue full (the second column of
// softnet_stat).
func addBacklogOverflows(t *testing.T, overflows counts) {
	t.Helper()
	text, err := os.ReadFile("/proc/net/softnet_stat")
	must(t, err)
	cpu := 0
	for line := range strings.Lines(string(text)) {
		overflows[fmt.Sprintf("backlog of CPU %d", cpu)] = parseNumber(t, strings.Fields(line)[1], 16)
		cpu++
	}
}

func parseNumber(t *testing.T, text string, base int) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(text, base, 64)
	must(t, err)
	return n
}

// tcpCounter returns one of a node's TCP counters (RFC 4022).
func tcpCounter(t *testing.T, n *lab.Node, name string) uint64 {
	t.Helper()
	out, err := n.Run(t.Context(), "cat", "/proc/net/snmp")
	must(t, err)
	var names []string
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if fields[0] != "Tcp:" {
			continue
		}
		for i, field := range names {
			if field == name {
				return parseNumber(t, fields[i], 10)
			}
		}
		names = fields
	}
	t.Fatalf("%s has no counter %s: %s", n.Name, name, out)
	return 0
}

// processMemory returns the resident memory of a process without the pages of files, in bytes.
func processMemory(t *testing.T, p *lab.Process) uint64 {
	t.Helper()
	pid, alive := p.PID()
	if !alive {
		t.Fatalf("%s does not run", p)
	}
	return 1024 * procField(t, fmt.Sprintf("/proc/%d/status", pid), "RssAnon:")
}

// mapMemory returns the memory that the kernel has allocated for the maps of an instance, in bytes.
func mapMemory(t *testing.T, instance string) (total uint64) {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(datapath.Dir(instance), "*"))
	must(t, err)
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(pin, nil)
		if err != nil { // the pin is a program or a link
			continue
		}
		total += procField(t, fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()), "memlock:")
		must(t, m.Close())
	}
	if total == 0 {
		t.Fatalf("instance %s has no maps", instance)
	}
	return total
}

// procField returns the number after a name in a file of /proc.
func procField(t *testing.T, path, name string) uint64 {
	t.Helper()
	file, err := os.Open(path)
	must(t, err)
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 1 && fields[0] == name {
			return parseNumber(t, fields[1], 10)
		}
	}
	t.Fatalf("%s has no %s", path, name)
	return 0
}

// requireBounded fails the test if the last sweep found more flows in a flow table than it has
// entries.
func requireBounded(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		n := l.Node(name)
		table := flowTable(t, n)
		if table.Flows == nil { // the start has swept the table
			t.Fatalf("%s has not counted its flows", name)
		}
		if all := table.Flows.Total(); all > 2*table.Capacity || table.Capacity != floodedFlows {
			t.Errorf("%s has %d flows in a table for %d", name, all, table.Capacity)
		}
	}
}

// flowTable reads the state of a balancer's flow table by `segue status`.
func flowTable(t *testing.T, n *lab.Node) inspect.FlowTable {
	t.Helper()
	out, err := n.Run(t.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	must(t, err)
	var status inspect.Snapshot
	must(t, json.Unmarshal([]byte(out), &status))
	return status.FlowTable
}

// countedSince returns the flows of a balancer's flow table. It returns an error if no sweep has
// counted them since the start.
func countedSince(t *testing.T, n *lab.Node, start time.Time) (dataplane.FlowCounts, error) {
	t.Helper()
	elapsed := time.Since(start)
	table := flowTable(t, n)
	if table.Age == nil || *table.Age > elapsed.Seconds() {
		return dataplane.FlowCounts{}, fmt.Errorf("%s has not swept its flow table since %v", n.Name, start)
	}
	return *table.Flows, nil
}

// newFlows returns the number of flows that a balancer has placed since before.
func newFlows(t *testing.T, l *lab.Lab, name string, before stock) uint64 {
	t.Helper()
	grown := packetCounts(t, l.Node(name)).since(t, before.counts[name])
	return grown["forward_new"] + grown["forward_no_room"]
}

// isFlooded tells whether new flows could have filled every balancer's table ten times since
// before, however slow the machine is.
func isFlooded(t *testing.T, l *lab.Lab, before stock) bool {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		if newFlows(t, l, name, before) < 10*2*floodedFlows {
			return false
		}
	}
	return true
}

// requireFlooded fails the test unless the sent packets have reached all balancers.
func requireFlooded(t *testing.T, l *lab.Lab, before stock, sent uint64) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		if n := newFlows(t, l, name, before); n < sent/3 {
			t.Errorf("%s got %d new flows of %d SYNs", name, n, sent)
		}
	}
}
