// SPDX-License-Identifier: Apache-2.0

package bench

//go:generate go tool bpf2go -target bpfel throughput ../../bpf/bench/throughput.bpf.c -- -I../../bpf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/lab/pktgen"
)

// Way is a path that packets take in a measurement of throughput. On the network ways, a generator
// sends packets of known flows through a veth, and the same core processes them. Each network way
// contains the one before, so the differences show the cost of each part.
type Way string

// The ways of packets.
const (
	// Dropped packets are dropped behind the first veth. So this is the cost of generator and veth.
	Dropped Way = "dropped"
	// PassedOn packets are forwarded unchanged through a second veth, and dropped behind it.
	PassedOn Way = "passed-on"
	// Balanced packets are forwarded by xdp_lb with srv6-insert, and dropped behind the second
	// veth.
	Balanced Way = "balanced"
	// BalancedAlike is Balanced with the same flows on all cores. A network card would give each
	// flow to one core.
	BalancedAlike Way = "balanced-alike"

	// The other ways are test runs without a network. The cores share only the balancer's tables.

	// HostAlone runs only the host program, which writes each packet anew.
	HostAlone Way = "host"
	// HostBalanced runs xdp_lb with a full flow table. All cores have the same flows, which are
	// few.
	HostBalanced Way = "host-balanced"
	// HostBalancedMany is HostBalanced with all flows of the table on all cores.
	HostBalancedMany Way = "host-balanced-1M"
	// HostHashMix has the packets of new connections: the SYN, a later packet and the FIN (HLB,
	// section VI-F). Each core has connections of its own. They go to 1000 servers by placement
	// hash.
	HostHashMix Way = "host-mix-hash"
	// HostInferMix is HostHashMix with placement infer.
	HostInferMix Way = "host-mix-infer"
)

var (
	networkWays = []Way{Dropped, PassedOn, Balanced, BalancedAlike}
	testRunWays = []Way{HostAlone, HostBalanced, HostBalancedMany, HostHashMix, HostInferMix}
)

// MinThroughputDuration is the shortest useful measurement. A shorter one would only show the start
// of the traffic.
const MinThroughputDuration = 10 * time.Millisecond

// ThroughputOptions are the options of MeasureThroughput.
type ThroughputOptions struct {
	Cores    []int          // the numbers of cores to compare; default 1 and 2
	Flows    uint32         // the number of flows of each core; default 1000, at most 2^20
	Servers  int            // the number of servers on the network ways; default 16, at most 256
	Duration time.Duration  // the length of each measurement; default 1 s
	Rounds   int            // how often each way is measured; default 9
	Setups   *regexp.Regexp // matches the names of the ways to measure; default all

	Progress Progress
}

// Throughput is the total throughput of a number of cores on a way.
type Throughput struct {
	Way   Way `json:"way"`
	Cores int `json:"cores"`
	// PacketsPerSecond is the median rate of the packets that arrived at the end of the way. For
	// test runs it is the rate per second of CPU time. P10 and P90 are percentiles.
	PacketsPerSecond float64 `json:"packets_per_second"`
	P10              float64 `json:"packets_per_second_p10"`
	P90              float64 `json:"packets_per_second_p90"`
	// Mean is the mean rate of all rounds. Unlike medians, means of several cores add up, even if a
	// core is sometimes fast and sometimes slow. So speedups are ratios of means.
	Mean float64 `json:"packets_per_second_mean"`
	// Lost is the largest share of packets of any round that were lost, because the queue of a veth
	// was full.
	Lost float64 `json:"lost"`
}

// Speedup returns the mean throughput of a number of cores divided by that of one core. It is NaN
// if one of the two was not measured.
func Speedup(results []Throughput, way Way, cores int) float64 {
	mean := func(cores int) float64 {
		i := slices.IndexFunc(results, func(t Throughput) bool {
			return t.Way == way && t.Cores == cores
		})
		if i < 0 { // not measured
			return math.NaN()
		}
		return results[i].Mean
	}
	return mean(cores) / mean(1)
}

// MeasureThroughput measures the packets per second of a balancer on different numbers of cores.
// For the network ways it makes three network namespaces: one for the generators, one for the
// balancer, and one for a program that drops all packets. It needs root and idle cores. It returns
// an error if the options ask for more cores than this process may use, or select no way.
func MeasureThroughput(ctx context.Context, options ThroughputOptions) (_ []Throughput, err error) {
	options.setDefaults()
	ways := options.ways()
	if len(ways) == 0 {
		return nil, fmt.Errorf("throughput: no setup matches %q", options.Setups)
	}
	cpus, err := allowedCPUs()
	if err != nil {
		return nil, err
	}
	most := slices.Max(options.Cores)
	if most > len(cpus) {
		return nil, fmt.Errorf("throughput of %d cores: there are %d", most, len(cpus))
	}
	bed, err := newTestbed(cpus[:most], &options)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("throughput: %w", err), bed.close())
	}
	defer func() { err = errors.Join(err, bed.close()) }()
	runs, err := newTestRuns(ctx, most, &options)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("throughput: %w", err), runs.close())
	}
	defer func() { err = errors.Join(err, runs.close()) }()

	// The key of both maps is a Throughput in which only Way and Cores are set. order has the keys
	// in the order of the first round.
	rates := map[Throughput][]float64{}
	lost := map[Throughput]float64{}
	var order []Throughput
	for round := range options.Rounds {
		options.Progress.say("round %d of %d", round+1, options.Rounds)
		bed.rotate()
		for _, way := range ways {
			for _, cores := range options.Cores {
				key := Throughput{Way: way, Cores: cores}
				rate, missing, err := measureWay(ctx, bed, runs, way, cores)
				if err != nil {
					return nil, fmt.Errorf("throughput: %s on %d cores: %w", way, cores, err)
				}
				if rates[key] == nil {
					order = append(order, key)
				}
				rates[key], lost[key] = append(rates[key], rate), max(lost[key], missing)
			}
		}
	}
	for i := range order {
		order[i].summarize(rates[order[i]], lost[order[i]])
	}
	return order, nil
}

func (o *ThroughputOptions) ways() (ways []Way) {
	for _, way := range slices.Concat(networkWays, testRunWays) {
		if o.Setups == nil || o.Setups.MatchString(string(way)) {
			ways = append(ways, way)
		}
	}
	return ways
}

// measureWay makes one measurement. It returns the packets per second, and the share of lost
// packets.
func measureWay(
	ctx context.Context, bed *testbed, runs *testRuns, way Way, cores int,
) (rate, lost float64, err error) {
	if slices.Contains(networkWays, way) {
		return bed.measure(ctx, way, cores)
	}
	rate, err = runs.measure(ctx, way, bed.cpus[:cores])
	return rate, 0, err
}

// setDefaults sets the options that are zero to their defaults.
func (o *ThroughputOptions) setDefaults() {
	if len(o.Cores) == 0 {
		o.Cores = []int{1, 2}
	}
	if o.Flows == 0 {
		o.Flows = 1000
	}
	if o.Servers == 0 {
		o.Servers = 16
	}
	if o.Duration == 0 {
		o.Duration = time.Second
	}
	if o.Rounds == 0 {
		o.Rounds = 9
	}
}

// summarize sets the results from the rates of all rounds, and from the largest share of lost
// packets.
func (t *Throughput) summarize(rates []float64, lost float64) {
	t.PacketsPerSecond = percentile(rates, 50)
	t.P10, t.P90 = percentile(rates, 10), percentile(rates, 90)
	for _, rate := range rates {
		t.Mean += rate / float64(len(rates))
	}
	t.Lost = lost
}

// allowedCPUs returns the CPUs that this process may use.
func allowedCPUs() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read the CPUs: %w", err)
	}
	var cpus []int
	for cpu := 0; len(cpus) < set.Count(); cpu++ {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

// testbed is the network of the network ways, in three namespaces: source, middle and sink. Two
// veths, with a queue for each core, connect them. Generators send from interface source, the
// balancer receives on in and sends on out, and a program drops all packets that arrive on
// interface sink.
type testbed struct {
	options  *ThroughputOptions
	cpus     []int // one for each core that is used; core n runs on CPU cpus[n]
	source   *netdev.Namespace
	middle   *netdev.Namespace
	sink     *netdev.Namespace
	from     nexthop.Link // interface source
	in, out  nexthop.Link // interfaces in and out
	to       nexthop.Link // interface sink
	programs throughputObjects
	balancer *balancer.Rehearsal
	attached []link.Link // of programs, except for the one on in
	instance string      // the balancer's
}

var throughputVIP = netip.MustParseAddrPort("[2001:db8:80::1]:80")

// newTestbed returns a testbed whose balancer knows the flows of all cores. Even if it fails, the
// caller must close the returned value.
func newTestbed(cpus []int, options *ThroughputOptions) (*testbed, error) {
	b := &testbed{options: options, cpus: cpus, instance: fmt.Sprintf("bench-%d", os.Getpid())}
	if err := b.connect(); err != nil {
		return b, err
	}
	spec, err := loadThroughput()
	if err != nil {
		return b, err
	}
	if err := spec.Variables[throughputVarEgress].Set(uint32(b.out.Index)); err != nil {
		return b, err
	}
	if err := spec.LoadAndAssign(&b.programs, nil); err != nil {
		return b, err
	}
	if err := b.sink.Do(func() error { return b.attach(b.programs.Sink, b.to.Index) }); err != nil {
		return b, err
	}
	if err := b.addBalancer(); err != nil {
		return b, err
	}
	for core := range cpus {
		if err := b.enterFlows(core); err != nil {
			return b, err
		}
	}
	return b, nil
}

// connect makes the namespaces and the veths, and reads the properties of the interfaces.
func (b *testbed) connect() (err error) {
	for _, ns := range []**netdev.Namespace{&b.source, &b.middle, &b.sink} {
		if *ns, err = netdev.NewNamespace(); err != nil {
			return err
		}
	}
	for _, ends := range [][2]netdev.End{
		{{Namespace: b.source, Name: "source"}, {Namespace: b.middle, Name: "in"}},
		{{Namespace: b.middle, Name: "out"}, {Namespace: b.sink, Name: "sink"}},
	} {
		if err := netdev.Connect(ends[0], ends[1], len(b.cpus)); err != nil {
			return err
		}
	}
	for _, end := range []struct {
		namespace *netdev.Namespace
		name      string
		link      *nexthop.Link
	}{
		{b.source, "source", &b.from}, {b.middle, "in", &b.in},
		{b.middle, "out", &b.out}, {b.sink, "sink", &b.to},
	} {
		err := end.namespace.Do(func() error { return describe(end.name, end.link) })
		if err != nil {
			return err
		}
	}
	return nil
}

// describe stores the properties of an interface of the calling thread's namespace in out.
func describe(name string, out *nexthop.Link) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	a := l.Attrs()
	*out = nexthop.Link{
		Index: a.Index, Name: name, Type: l.Type(), MAC: [6]byte(a.HardwareAddr), MTU: a.MTU,
	}
	return nil
}

// attach attaches an XDP program natively to an interface, until the testbed is closed.
func (b *testbed) attach(program *ebpf.Program, ifindex int) error {
	l, err := link.AttachXDP(link.XDPOptions{
		Program: program, Interface: ifindex, Flags: link.XDPDriverMode,
	})
	if err == nil {
		b.attached = append(b.attached, l)
	}
	return err
}

// addBalancer makes a balancer, without a daemon, and attaches it in the middle namespace.
func (b *testbed) addBalancer() (err error) {
	quiet := slog.New(slog.DiscardHandler)
	if b.balancer, err = balancer.NewRehearsal(b.config(), desired.Secrets{}, quiet); err != nil {
		return err
	}
	hop := nexthop.Hop{MAC: b.to.MAC, Link: b.out}
	return b.middle.Do(func() error { return b.balancer.Attach([]nexthop.Link{b.in}, hop) })
}

// config returns the configuration of the balancer. Its flows do not time out during a measurement.
func (b *testbed) config() *desired.Balancer {
	web := desired.Service{
		Name: "web", VIP: throughputVIP.Addr(), Port: desired.Port(throughputVIP.Port()),
		Protocol: desired.TCP, Placement: desired.PlacementHash,
		Persistence: desired.PersistenceTable, Encapsulation: desired.SRv6Insert,
		Candidates: 3, Generations: 3, Buckets: 65537,
		Timeouts: desired.Timeouts{New: time.Hour, Established: time.Hour, Closing: time.Hour},
	}
	one := uint32(1)
	for i := range b.options.Servers {
		locator := netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 7: byte(i)})
		web.Servers = append(web.Servers, desired.Server{
			Name: fmt.Sprintf("s%d", i), Locator: netip.PrefixFrom(locator, srv6.LocatorBits), Weight: &one,
		})
	}
	return &desired.Balancer{
		Node: desired.BalancerNode{
			Instance: b.instance, Interface: b.in.Name,
			Locator: netip.MustParsePrefix("fd00:6c:0:1::/64"),
			Limits: desired.Limits{
				// In a table of twice the number of flows, nearly all flows find room.
				Flows:   max(1<<20, 2*b.options.Flows*uint32(len(b.cpus))),
				Servers: uint32(b.options.Servers),
			},
		},
		Services: []desired.Service{web},
	}
}

func (b *testbed) close() error {
	var errs []error
	for _, l := range b.attached {
		errs = append(errs, l.Close())
	}
	if b.balancer != nil {
		errs = append(errs, b.balancer.Close(),
			b.middle.Do(func() error { return dataplane.Detach(b.instance) }))
	}
	if b.programs.Sink != nil {
		errs = append(errs, b.programs.Close())
	}
	for _, ns := range []*netdev.Namespace{b.source, b.middle, b.sink} {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}

// packets returns the configuration of a core's generator. It sends packets of the core's own flows
// or, with alike, of the flows of core 0.
func (b *testbed) packets(core int, alike bool) pktgen.Config {
	owner := byte(core) // of the flows
	if alike {
		owner = 0
	}
	source := netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 5: 0x0f, 7: owner})
	return pktgen.Config{
		Kind: pktgen.ACK, Flows: b.options.Flows,
		Sources: netip.PrefixFrom(source, 64), Destination: throughputVIP,
		SourceMAC: b.from.MAC, DestinationMAC: b.in.MAC, Interface: b.from.Index, CPU: b.cpus[core],
	}
}

// enterFlows sends two packets of each flow of a core: the first enters the flow into the flow
// table, and the second confirms it.
func (b *testbed) enterFlows(core int) error {
	for _, kind := range []pktgen.Kind{pktgen.SYN, pktgen.ACK} {
		cfg := b.packets(core, false)
		cfg.Kind, cfg.Order, cfg.Count = kind, pktgen.InTurn, uint64(cfg.Flows)
		if _, err := b.generate(context.Background(), cfg); err != nil {
			return err
		}
	}
	return nil
}

// rotate gives each core another CPU for the next round. So the measurements with one core use all
// CPUs in turn, because the speeds of CPUs may differ.
func (b *testbed) rotate() {
	b.cpus = append(b.cpus[1:], b.cpus[0])
}

// generate runs a new generator in the source namespace.
func (b *testbed) generate(ctx context.Context, cfg pktgen.Config) (pktgen.Result, error) {
	g, err := pktgen.New(cfg)
	if err != nil {
		return pktgen.Result{}, err
	}
	defer g.Close()
	return b.run(ctx, g)
}

func (b *testbed) run(ctx context.Context, g *pktgen.Generator) (result pktgen.Result, err error) {
	err = b.source.Do(func() (err error) {
		result, err = g.Run(ctx)
		return err
	})
	return result, err
}

// useProgramOf makes the interface b.in run the program of a way: one that drops packets, one that
// passes them on, or the balancer's own.
func (b *testbed) useProgramOf(way Way) error {
	program := map[Way]*ebpf.Program{Dropped: b.programs.Sink, PassedOn: b.programs.PassOn}[way]
	dir := datapath.Dir(b.instance)
	if program == nil { // the balancer's own program
		pinned, err := ebpf.LoadPinnedProgram(filepath.Join(dir, datapath.BalancerProgram), nil)
		if err != nil {
			return err
		}
		defer pinned.Close()
		program = pinned
	}
	return b.middle.Do(func() error {
		return datapath.TakeOver(slog.New(slog.DiscardHandler), func(t *datapath.Takeover) error {
			return t.UpdateLink(program, b.in.Index, filepath.Join(dir, datapath.LinkPin))
		})
	})
}
