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
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/lab"
	"github.com/segue-lb/segue/internal/loadgen"
	"github.com/segue-lb/segue/internal/packet"
)

var (
	floodTime = flag.Duration("flood", 5*time.Second, "how long the flood of SYNs lasts at least")
	floodRate = flag.Float64("flood.rate", 20_000, "SYNs per second of the flood; 0: as many as the machine can")
)

// spoofed are the sources of the flood. No host of the lab has any of them.
var spoofed = netip.MustParsePrefix("2001:db8:bad::/64")

// floodedFlows is the capacity of the balancers' flow tables, each of which has twice as many entries.
const floodedFlows = 1024

// TestSYNFlood sends SYNs of spoofed sources through the edge router to both balancers, and on to the
// servers, many times as many as the flow tables have entries. Connections go on meanwhile and new ones
// open, nothing is reset, and no memory grows.
//
// The generator takes the place of the edge router's link to the world: what it makes is received there.
// It shares the machine's cores with all that follows: router, switch, balancers, servers, and clients. A
// flood that leaves no core idle fills the queues between them (256 frames of a veth, 1000 packets of a
// CPU), and the lab loses packets of everybody, by no fault of the balancer. The test tells how many each
// queue lost. At the default rate two cores lose none or few, mostly of the servers' answers to the flood;
// with -flood.rate=0 the lab is flooded far beyond that. TCP makes good what is lost.
//
// The servers answer with SYN cookies, Linux's default (net.ipv4.tcp_syncookies), once their queues are
// full of what the flood left.
func TestSYNFlood(t *testing.T) {
	l := up(t, topology(mixed...))
	shrinkFlowTables(t, l)
	// What the servers answer goes nowhere, and says so to nobody.
	command(t, l, "edge", "ip", "route", "add", "blackhole", spoofed.String())
	live := openResting(t, l, 300, longestThink, l.Topology.Services...)
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
	for node, memory := range after.memory {
		if was := before.memory[node]; memory.kernel != was.kernel || memory.process > was.process+8<<20 {
			t.Errorf("memory of %s: %+v before the flood, %+v after", node, was, memory)
		}
	}
}

// TestSYNFloodOfAServiceThatHunts sends 200,000 SYNs of spoofed sources to servers that answer each. None becomes
// a flow of the balancers', whose tables have the connections from before, and no others, in the end.
// Meanwhile connections go on and new ones open. Of the lab's own losses TestSYNFlood tells.
func TestSYNFloodOfAServiceThatHunts(t *testing.T) {
	const syns, connections = 200_000, 300
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
	for ; offered() < syns+uint64(visitors.answered.Load()); rounds++ {
		live.rounds(t, 1)
		visitors.more(t, 10)
		flood.requireRunning(t)
	}
	sent := flood.stop(t)
	live.rounds(t, 1)
	live.requireUnbroken(t)
	visitors.requireContent(t)
	after := takeStock(t, l)
	visitors.stop() // who may leave in the middle of an answer, with a reset
	t.Logf("%d SYNs, %.0f a second; %d rounds of requests on %d connections, %d new ones; %d segments sent again; "+
		"the lab's own queues lost %v", sent.Sent, sent.Rate(), rounds, connections, visitors.answered.Load(),
		after.resent-before.resent, after.lost(t, before))
	if sent.Sent < syns {
		t.Errorf("the flood had %d SYNs", sent.Sent)
	}
	requireEstablished(t, l, connections)
	if n := after.resets - before.resets; n > 0 {
		t.Errorf("%d connections were reset", n)
	}
	requireNoDrops(t, l)
}

// requireEstablished fails the test unless the flow tables have so many flows that neither begin nor end. Those
// of connections that have just been closed have to leave first.
func requireEstablished(t *testing.T, l *lab.Lab, n uint64) {
	t.Helper()
	eventually(t, func() error {
		var flows dataplane.FlowCounts
		for _, name := range nodes(l, lab.RoleBalancer) {
			table := flowTable(t, l.Node(name))
			flows.New += table.Flows.New
			flows.Established += table.Flows.Established
		}
		if flows.Established != n || flows.New > 0 {
			return fmt.Errorf("the flow tables have %d established flows and %d new ones, want %d and none", flows.Established, flows.New, n)
		}
		return nil
	})
}

// shrinkFlowTables starts the balancers again with small tables.
func shrinkFlowTables(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		n, p := l.Node(name), l.Process(name, "lb")
		must(t, p.Stop())
		command(t, l, name, segue, "lb", "detach", n.Instance())
		cfg := n.BalancerConfig()
		cfg.Node.Limits = config.Limits{Flows: floodedFlows}
		must(t, n.WriteBalancerConfig(cfg))
		must(t, p.Start(t.Context()))
	}
}

// flood is one that is going on.
type flood struct {
	cancel context.CancelFunc
	result loadgen.Result
	done   chan struct{}
	err    error
}

// startFlood sends SYNs to an address, as if they came by the edge router's link to the clients.
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

// stop ends the flood and returns what was sent.
func (f *flood) stop(t *testing.T) loadgen.Result {
	t.Helper()
	f.cancel()
	<-f.done
	must(t, f.err)
	return f.result
}

func sendFlood(ctx context.Context, to netip.AddrPort) (loadgen.Result, error) {
	downlink, err := netlink.LinkByName("eth1")
	if err != nil {
		return loadgen.Result{}, err
	}
	g, err := loadgen.New(loadgen.Config{
		Kind: loadgen.SYN, Sources: spoofed, Destination: to,
		SourceMAC: packet.MAC{2, 0, 0, 0, 0, 1}, DestinationMAC: packet.MAC(downlink.Attrs().HardwareAddr),
		Interface: downlink.Attrs().Index, Receive: true, Rate: *floodRate, Batch: 32, CPU: -1,
	})
	if err != nil {
		return loadgen.Result{}, err
	}
	defer g.Close()
	return g.Run(ctx)
}

// stock is what a flood may change.
type stock struct {
	overflows counts // packets that the lab's own queues lost, by the queue
	resent    uint64 // segments that the client has sent again
	resets    uint64 // connections of the client that a reset has ended
	counts    map[string]counts
	memory    map[string]memory
}

// memory of a balancer, in bytes.
type memory struct {
	process uint64 // resident
	kernel  uint64 // of all maps
}

// lost is what the lab's own queues lost since.
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

// queueFull are the counters of a veth for frames that found a queue full.
var queueFull = regexp.MustCompile(`(\w+_(?:drops|xdp_tx_errors|xdp_xmit_errors)): (\d+)`)

// linkOverflows is what the links of a lab have lost.
func linkOverflows(t *testing.T, l *lab.Lab) counts {
	t.Helper()
	overflows := counts{}
	for _, n := range l.Nodes {
		addLinkOverflows(t, n, overflows)
	}
	return overflows
}

// addLinkOverflows adds what the links of a node have lost.
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
			if !strings.HasSuffix(match[1], "_xdp_drops") { // by verdict of a program
				overflows[name+" "+match[1]] = parseNumber(t, match[2], 10)
			}
		}
	}
}

// addBacklogOverflows adds what found the queue of a CPU full (the second column of softnet_stat).
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

// tcpCounter is one of a node's counters of TCP (RFC 4022).
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

// processMemory is what a process has resident, without what it shares with files.
func processMemory(t *testing.T, p *lab.Process) uint64 {
	t.Helper()
	pid, alive := p.PID()
	if !alive {
		t.Fatalf("%s does not run", p)
	}
	return 1024 * procField(t, fmt.Sprintf("/proc/%d/status", pid), "RssAnon:")
}

// mapMemory is what the kernel has allocated for the maps of an instance.
func mapMemory(t *testing.T, instance string) (total uint64) {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(datapath.Dir(instance), "*"))
	must(t, err)
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(pin, nil)
		if err != nil { // a program or a link
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

// procField is the number that follows a name in a file of /proc.
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

// requireBounded fails the test if a flow table has more flows than it has entries.
func requireBounded(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		n := l.Node(name)
		table := flowTable(t, n)
		flows := table.Flows
		if all := flows.New + flows.Established + flows.Closing; all > 2*table.Capacity || table.Capacity != floodedFlows {
			t.Errorf("%s has %d flows in a table for %d", name, all, table.Capacity)
		}
	}
}

// flowTable has segue tell what is in a balancer's flow table.
func flowTable(t *testing.T, n *lab.Node) inspect.FlowTable {
	t.Helper()
	out, err := n.Run(t.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	must(t, err)
	var status inspect.Snapshot
	must(t, json.Unmarshal([]byte(out), &status))
	return status.FlowTable
}

// newFlows is how many packets a balancer has since placed.
func newFlows(t *testing.T, l *lab.Lab, name string, before stock) uint64 {
	t.Helper()
	grown := packetCounts(t, l.Node(name)).since(t, before.counts[name])
	return grown["forward_new"] + grown["forward_no_room"]
}

// isFlooded tells whether all balancers' tables were filled ten times over since, however slow the
// machine is.
func isFlooded(t *testing.T, l *lab.Lab, before stock) bool {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		if newFlows(t, l, name, before) < 10*2*floodedFlows {
			return false
		}
	}
	return true
}

// requireFlooded fails the test unless what was sent has come to all balancers.
func requireFlooded(t *testing.T, l *lab.Lab, before stock, sent uint64) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		if n := newFlows(t, l, name, before); n < sent/3 {
			t.Errorf("%s got %d new flows of %d SYNs", name, n, sent)
		}
	}
}
