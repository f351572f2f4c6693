// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/lab"
)

// ControlSize is the size of a balancer's desired state.
type ControlSize struct {
	Services int `json:"services"`
	Servers  int `json:"servers"` // of all services together; each is a host of its own
}

// ControlOptions are the options of MeasureControl.
type ControlOptions struct {
	Segue    string // the executable of segue
	Sizes    []ControlSize
	Rounds   int // how often each case is measured
	Progress Progress
}

// ControlTime has the times of a case, each the median of all rounds. In a case, the balancer
// starts, or a command changes it or reads its state.
type ControlTime struct {
	ControlSize
	Case    string        `json:"case"`
	Process time.Duration `json:"process_cpu_ns"` // CPU time of the balancer's process
	Command time.Duration `json:"command_cpu_ns"` // CPU time of the command; 0 for the start
	Wall    time.Duration `json:"wall_ns"`
}

// MeasureControl measures the times to start a balancer without traffic, to change it, and to read
// its state. Each balancer has a network namespace of its own. MeasureControl needs root.
func MeasureControl(ctx context.Context, o ControlOptions) ([]ControlTime, error) {
	var times []ControlTime
	for _, size := range o.Sizes {
		o.Progress.say("%d services, %d servers", size.Services, size.Servers)
		some, err := measureControl(ctx, &o, size)
		if err != nil {
			return nil, fmt.Errorf("%d services, %d servers: %w", size.Services, size.Servers, err)
		}
		times = append(times, some...)
	}
	return times, nil
}

func measureControl(
	ctx context.Context, o *ControlOptions, size ControlSize,
) (_ []ControlTime, err error) {
	host, err := newControlHost(o.Segue, size)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, host.remove()) }()
	var times []ControlTime
	for round := range o.Rounds {
		o.Progress.say("round %d of %d", round+1, o.Rounds)
		some, err := host.round(ctx)
		if err != nil {
			return nil, err
		}
		times = append(times, some...)
	}
	return mediansOf(times, size), nil
}

// mediansOf returns the medians of each case, in the order of the first round.
func mediansOf(times []ControlTime, size ControlSize) (medians []ControlTime) {
	var names []string // of the cases
	byCase := map[string][]ControlTime{}
	for _, t := range times {
		if byCase[t.Case] == nil {
			names = append(names, t.Case)
		}
		byCase[t.Case] = append(byCase[t.Case], t)
	}
	for _, name := range names {
		median := func(get func(ControlTime) time.Duration) time.Duration {
			var all []time.Duration
			for _, t := range byCase[name] {
				all = append(all, get(t))
			}
			slices.Sort(all)
			return all[len(all)/2]
		}
		medians = append(medians, ControlTime{
			ControlSize: size, Case: name,
			Process: median(func(t ControlTime) time.Duration { return t.Process }),
			Command: median(func(t ControlTime) time.Duration { return t.Command }),
			Wall:    median(func(t ControlTime) time.Duration { return t.Wall }),
		})
	}
	return medians
}

// controlHost is a network namespace for a balancer, with a directory for its files.
type controlHost struct {
	size      ControlSize
	segue     string // the executable
	namespace *netdev.Namespace
	dir       string
	instance  string
}

func newControlHost(segue string, size ControlSize) (h *controlHost, err error) {
	h = &controlHost{size: size, segue: segue, instance: fmt.Sprintf("bench-control-%d", os.Getpid())}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.remove())
		}
	}()
	if h.dir, err = os.MkdirTemp("", "segue-bench-"); err != nil {
		return h, err
	}
	if h.namespace, err = netdev.NewNamespace(); err != nil {
		return h, err
	}
	return h, h.namespace.Do(buildControlNetwork)
}

const controlInterface = "eth0" // the balancer's

// buildControlNetwork makes the balancer's interface in the calling thread's namespace. It also
// makes a route to all servers, through a router that does not exist. The router has a permanent
// neighbour entry, so nothing has to be resolved.
func buildControlNetwork() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "peer"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: controlInterface}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("make a veth pair: %w", err)
	}
	var index int // after the loop, that of controlInterface
	for _, name := range []string{attrs.Name, controlInterface} {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkSetUp(link)
		}
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		index = link.Attrs().Index
	}
	router, servers := netip.MustParseAddr("fd00:99::2"), netip.MustParsePrefix("fd00:5::/32")
	return errors.Join(
		netlink.NeighSet(&netlink.Neigh{
			LinkIndex: index, State: netlink.NUD_PERMANENT, IP: router.AsSlice(),
			HardwareAddr: []byte{2, 0, 0, 0, 0, 2},
		}),
		netlink.RouteAdd(&netlink.Route{
			LinkIndex: index, Gw: router.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
			Dst: &net.IPNet{IP: servers.Addr().AsSlice(), Mask: net.CIDRMask(servers.Bits(), 128)},
		}))
}

func (h *controlHost) remove() error {
	var errs []error
	if h.namespace != nil {
		errs = append(errs, h.namespace.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(h.dir))...)
}

// round measures each case once: it starts a balancer, runs all commands, and stops the balancer.
func (h *controlHost) round(ctx context.Context) (times []ControlTime, err error) {
	config := filepath.Join(h.dir, "lb.yaml")
	if err := h.configure(config, 1); err != nil {
		return nil, err
	}
	lb := &controlled{host: h}
	start := time.Now()
	if err := lb.start(ctx, config); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lb.stop()) }()
	used, err := lb.cpuTime()
	if err != nil {
		return nil, err
	}
	times = append(times, ControlTime{Case: "start", Process: used, Wall: time.Since(start)})

	service := fmt.Sprint("web", h.size.Services/2)
	server := service + "/s1"
	for _, c := range []struct {
		name      string
		prepare   func() error // done before the command, and not measured
		arguments []string     // of segue
	}{
		{"drain", nil, []string{"drain", server}},
		{"undrain", nil, []string{"undrain", server}},
		{"weight", nil, []string{"server", "set", server, "weight=2"}},
		{"add", nil, []string{"server", "add", service + "/new", "locator=fd00:5:ffff::/64"}},
		{"remove", nil, []string{"server", "remove", service + "/new"}},
		{"status", nil, []string{"status", "--interval", "0"}},
		{"status --service", nil, []string{"status", "--interval", "0", "--service", service}},
		{"server list", nil, []string{"server", "list"}},
		{"reload", func() error { return h.configure(config, 3) }, []string{"reload", "-c", config}},
	} {
		if c.prepare != nil {
			if err := c.prepare(); err != nil {
				return nil, err
			}
		}
		t, err := lb.measure(ctx, c.arguments)
		if err != nil {
			return nil, err
		}
		t.Case = c.name
		times = append(times, t)
	}
	return times, nil
}

// configure writes the balancer's configuration to a file. Services with odd numbers have placement
// hunt, and the others placement hash. weight is the weight of the first server of the last
// service. All other servers have weight 1. So a reload with another weight changes one server.
func (h *controlHost) configure(file string, weight int) error {
	var text strings.Builder
	fmt.Fprintf(&text, "node:\n  instance: %s\n  interface: %s\n  locator: fd00:6c:0:9::/64\n"+
		"  addresses: [10.99.1.1]\n  state: %s\n  limits: {flows: 65536, servers: %d}\nservices:\n",
		h.instance, controlInterface, filepath.Join(h.dir, "state"), 2*h.size.Servers+2)
	placements := []string{"hash", "hunt"}
	server := 0
	for i := range h.size.Services {
		fmt.Fprintf(&text, "- name: web%d\n  vip: 203.0.%d.%d\n  port: 80\n  protocol: tcp\n"+
			"  placement: %s\n  servers:\n", i, i>>8, i&255, placements[i%2])
		for j := range h.serversOf(i) {
			own := 1
			if i == h.size.Services-1 && j == 0 {
				own = weight
			}
			fmt.Fprintf(&text, "  - {name: s%d, locator: 'fd00:5:0:%x::/64', weight: %d}\n",
				j, server, own)
			server++
		}
	}
	return os.WriteFile(file, []byte(text.String()), 0o600)
}

// notifyPath returns the socket at which the balancer tells that it is ready.
func (h *controlHost) notifyPath() string { return filepath.Join(h.dir, "notify") }

// serversOf returns how many servers a service has. The servers are spread evenly over the
// services.
func (h *controlHost) serversOf(service int) int {
	return h.size.Servers*(service+1)/h.size.Services - h.size.Servers*service/h.size.Services
}

// command returns a command of segue, and a buffer for its output. The command gets SIGTERM when
// the context ends.
func (h *controlHost) command(ctx context.Context, arguments ...string) (*exec.Cmd, *bytes.Buffer) {
	cmd := exec.CommandContext(ctx, h.segue, arguments...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = endDeadline
	output := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = output, output
	return cmd, output
}

// run runs a command of segue in the namespace, and returns the CPU time that it took.
func (h *controlHost) run(ctx context.Context, arguments ...string) (time.Duration, error) {
	cmd, output := h.command(ctx, arguments...)
	err := h.namespace.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return 0, fmt.Errorf("segue %s: %w: %s", strings.Join(arguments, " "), err, output)
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

// controlled is a running balancer.
type controlled struct {
	host   *controlHost
	cmd    *exec.Cmd
	output *bytes.Buffer
	exited chan struct{} // closed when the process has ended
	err    error         // how the process ended; set before exited is closed
}

// startDeadline is the longest time that a balancer may take to be ready.
const startDeadline = 2 * time.Minute

// start starts the balancer and waits until it is ready. If the balancer starts and does not get
// ready, start also stops it.
func (c *controlled) start(ctx context.Context, config string) error {
	notify, err := lab.ListenNotify(c.host.notifyPath())
	if err != nil {
		return err
	}
	defer notify.Close()
	c.cmd, c.output = c.host.command(ctx, "lb", "-c", config)
	c.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+c.host.notifyPath())
	if err := c.host.namespace.Do(c.cmd.Start); err != nil {
		return err
	}
	c.exited = make(chan struct{})
	go func() {
		defer close(c.exited)
		c.err = c.cmd.Wait()
	}()
	ctx, cancel := context.WithTimeout(ctx, startDeadline)
	defer cancel()
	if err := notify.Await(ctx, c.exited, "READY=1"); err != nil {
		return errors.Join(fmt.Errorf("the balancer does not get ready: %w", err), c.stop())
	}
	return nil
}

// stop ends the balancer, and removes its data path and its state. So the next balancer begins
// without flows, tables and overrides.
func (c *controlled) stop() error {
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	<-c.exited
	err := c.err
	if err != nil {
		err = fmt.Errorf("segue lb: %w: %s", err, c.output)
	}
	// The context of the measurement may have ended, but the data path must be removed in any case.
	_, errDetach := c.host.run(context.Background(), "lb", "detach", c.host.instance)
	return errors.Join(err, errDetach, os.RemoveAll(filepath.Join(c.host.dir, "state")))
}

// measure runs a command of segue, and returns its times.
func (c *controlled) measure(ctx context.Context, arguments []string) (t ControlTime, err error) {
	before, err := c.cpuTime()
	if err != nil {
		return t, err
	}
	start := time.Now()
	if t.Command, err = c.host.run(ctx, arguments...); err != nil {
		return t, err
	}
	t.Wall = time.Since(start)
	after, err := c.cpuTime()
	t.Process = after - before
	return t, err
}

// cpuTime returns the CPU time of all threads of the balancer's process.
func (c *controlled) cpuTime() (time.Duration, error) {
	// The number of a process's CPU clock, as clock_getcpuclockid(3) computes it.
	const schedulerTime = 2 // CPUCLOCK_SCHED
	clock := int32(^c.cmd.Process.Pid<<3 | schedulerTime)
	var used unix.Timespec
	if err := unix.ClockGettime(clock, &used); err != nil {
		return 0, fmt.Errorf("CPU time of the balancer: %w", err)
	}
	return time.Duration(used.Nano()), nil
}
