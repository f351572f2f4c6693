// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

var (
	previous           = flag.String("previous", "", "`commit` from whose build TestUpgradeOfAFleet upgrades")
	upgradeConnections = flag.Int("upgrade.connections", 144,
		"how many connections TestUpgradeOfAFleet keeps open; each upgrade adds half as many")
)

// TestUpgradeOfAFleet upgrades three servers and two balancers one after the other, under load.
// After each upgrade, the edge router sends all packets to one balancer, then to the other, and
// then to both again. So each balancer gets flows of the other one, which may have another version.
// No connection breaks, every request is answered, and each host understands the signals of the
// others. The same holds if balancers are upgraded before servers.
func TestUpgradeOfAFleet(t *testing.T) {
	if *previous == "" {
		t.Skip("compiles an earlier build, and upgrades from it, which takes minutes: -previous")
	}
	t.Parallel()
	before := buildCommit(t, *previous)
	servers, balancers := []string{"s1", "s2", "s3"}, []string{"lb1", "lb2"}
	t.Run("servers first", func(t *testing.T) {
		f := newFleet(t, before)
		f.upgrade(t, slices.Concat(servers, balancers))
	})
	t.Run("balancers first", func(t *testing.T) {
		f := newFleet(t, before)
		f.upgrade(t, balancers[:1])
		f.requireCalls(t, balancers[0])
		f.upgrade(t, slices.Concat(balancers[1:], servers))
	})
}

// buildCommit builds segue as it was at a commit. It returns the path of the program.
func buildCommit(t *testing.T, commit string) string {
	t.Helper()
	project, err := filepath.Abs("../..")
	must(t, err)
	dir := t.TempDir()
	for _, command := range [][]string{
		{"git", "clone", "--quiet", "--no-checkout", project, "."},
		{"git", "checkout", "--quiet", commit},
		{"ln", "-s", filepath.Join(project, ".tools"), "."},
		{"make", "build"},
	} {
		cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build commit %s: %s: %v\n%s", commit, strings.Join(command, " "), err, out)
		}
	}
	return filepath.Join(dir, "bin/segue")
}

// A fleet is a lab under load whose hosts have programs of two builds.
type fleet struct {
	*lab.Lab
	upgraded *lab.Lab          // the same lab, which starts processes from the build under test
	programs map[string]string // the program of each balancer and server, by the host's name
	held     load              // opened before the first upgrade, and after each one
	visitors *visitors
	talks    []*talk
}

// fleetServices returns services of both families: for each method by which servers and balancers
// tell each other something, and at last those that need no agents. Only the flow table of one
// balancer knows the servers of the latter, so the edge router must not move them.
func fleetServices() (services, unmoved []lab.Service) {
	port := desired.Port(80)
	add := func(to *[]lab.Service, name, vip6, vip4 string, s lab.Service) {
		s.Port, s.Buckets = port, 4099 // the tables of so many services take long
		port++
		for _, vip := range []string{vip6, vip4} {
			s.VIP = netip.MustParseAddr(vip)
			s.Name = fmt.Sprintf("%s%d", name, map[bool]int{true: 4, false: 6}[s.VIP.Is4()])
			if s.Encapsulation != desired.GRE {
				s.Encapsulation = desired.SRv6Insert
				if s.VIP.Is4() {
					s.Encapsulation = desired.SRv6Encap
				}
			}
			*to = append(*to, s)
		}
	}
	moved := func(name string, s lab.Service) {
		if s.Protocol == "" {
			s.Protocol = desired.TCP
		}
		add(&services, name, "2001:db8:80::f1", "203.0.113.81", s)
	}
	moved("hash", lab.Service{})
	moved("hunt", lab.Service{Placement: desired.PlacementHunt})
	moved("reports", lab.Service{Placement: desired.PlacementHunt, Selection: desired.SelectReports})
	moved("stateless", lab.Service{Placement: desired.PlacementHunt, Persistence: desired.PersistenceStateless})
	moved("hint", lab.Service{Placement: desired.PlacementHunt, Persistence: desired.PersistenceHint})
	moved("infer", lab.Service{Placement: desired.PlacementInfer})
	moved("polled", lab.Service{
		Placement: desired.PlacementWeightedTurns,
		Load:      desired.Source{Kind: desired.LoadConnections, Capacity: 100},
	})
	moved("echo", lab.Service{Protocol: desired.UDP})
	for _, placement := range []desired.Placement{desired.PlacementInfer, desired.PlacementLeastQueue} {
		add(&unmoved, "unmoved-"+string(placement), "2001:db8:80::f2", "203.0.113.82", lab.Service{
			Protocol: desired.TCP, Encapsulation: desired.GRE, Placement: placement,
		})
	}
	return services, unmoved
}

func newFleet(t *testing.T, program string) *fleet {
	t.Helper()
	testhost.NeedCgroup2(t)
	services, unmoved := fleetServices()
	top := topology()
	top.Services = slices.Concat(services, unmoved)
	f := &fleet{Lab: build(t, top, program), programs: map[string]string{}}
	var err error
	f.upgraded, err = lab.Open(f.Name, executables(segue))
	must(t, err)
	for _, name := range slices.Concat(nodes(f.Lab, lab.RoleBalancer), nodes(f.Lab, lab.RoleServer)) {
		f.programs[name] = program
	}
	for _, name := range nodes(f.Lab, lab.RoleBalancer) {
		eventually(t, func() error { return f.requireWell(t, name) })
	}
	f.pinRoutes(t, unmoved)
	f.hold(t, *upgradeConnections, "")
	f.visitors = startVisitors(t, f.Lab, 8, f.tcp()...)
	for _, s := range f.Topology.Services {
		if s.Protocol == desired.UDP {
			f.talks = append(f.talks, startTalks(t, f.Lab, s, 8)...)
		}
	}
	return f
}

func (f *fleet) tcp() []lab.Service {
	return slices.DeleteFunc(slices.Clone(f.Topology.Services), func(s lab.Service) bool { return s.Protocol != desired.TCP })
}

// pinRoutes gives the edge router routes to the VIPs of some services that SetNextHops does not
// change.
func (f *fleet) pinRoutes(t *testing.T, services []lab.Service) {
	t.Helper()
	for _, s := range slices.CompactFunc(services, func(a, b lab.Service) bool { return a.VIP == b.VIP }) {
		route := []string{"route", "replace", "table", "100", s.VIP.String()}
		for _, name := range nodes(f.Lab, lab.RoleBalancer) {
			gateway := f.Node(name).IPv6
			if s.VIP.Is4() {
				gateway = f.Node(name).IPv4
			}
			route = append(route, "nexthop", "via", gateway.String())
		}
		family := map[bool]string{true: "-4", false: "-6"}[s.VIP.Is4()]
		command(t, f.Lab, "edge", "ip", append([]string{family}, route...)...)
		command(t, f.Lab, "edge", "ip", family, "rule", "add", "to", s.VIP.String(), "lookup", "100")
	}
}

// hold opens connections to the services of TCP in turn, which stay open to the end of the test. It
// returns which part of those that servers decide about is at a server.
func (f *fleet) hold(t *testing.T, n int, server string) (share float64) {
	t.Helper()
	opened := openResting(t, f.Lab, n, longestThink, f.tcp()...)
	f.held.connections = append(f.held.connections, opened.connections...)
	hunted, there := 0, 0
	for _, c := range opened.connections {
		if c.service.Placement == desired.PlacementHunt {
			hunted++
			if c.server == server {
				there++
			}
		}
	}
	return float64(there) / float64(hunted)
}

// upgrade upgrades hosts one after the other.
func (f *fleet) upgrade(t *testing.T, hosts []string) {
	t.Helper()
	for _, name := range hosts {
		f.requireNoDrops(t, name) // another build may have counters of its own
		process := "agent"
		if f.Node(name).Role == lab.RoleBalancer {
			process = "lb"
		}
		_, err := f.upgraded.Restart(t.Context(), name, []string{process}, false)
		must(t, err)
		f.programs[name] = segue
		f.move(t)
		f.requireUnderstanding(t)
		// A server that forgot its load would get most of them.
		if share := f.hold(t, *upgradeConnections/2, name); share > 0.6 {
			t.Errorf("%s is upgraded, and gets %.0f%% of the connections", name, 100*share)
		}
		f.requireNoLoss(t, name+" is upgraded")
	}
	for name := range f.programs {
		f.requireNoDrops(t, name)
	}
}

// move lets each balancer have all flows in turn.
func (f *fleet) move(t *testing.T) {
	t.Helper()
	all := nodes(f.Lab, lab.RoleBalancer)
	for _, balancers := range [][]string{all, all[1:], all[:1], all} {
		must(t, f.SetNextHops(balancers...))
		f.held.rounds(t, 1)
		f.visitors.more(t, 100)
		for _, talk := range f.talks {
			talk.goOn()
		}
	}
}

// requireNoLoss fails the test if a connection has broken, a request has failed, or a flow of UDP
// has changed its server.
func (f *fleet) requireNoLoss(t *testing.T, when string) {
	t.Helper()
	f.held.requireUnbroken(t)
	f.visitors.requireContent(t)
	for _, talk := range f.talks {
		if talk.err != nil {
			t.Errorf("a flow of %s from %s: %v", talk.service.Name, talk.conn.LocalAddr(), talk.err)
		}
	}
	t.Logf("%s: all %d connections are open, all %d requests answered, all %d flows of UDP at their servers",
		when, len(f.held.connections), f.visitors.answered.Load(), len(f.talks))
}

// status reads the state of a host by its own program, because the tables of another build can
// differ.
func (f *fleet) status(t *testing.T, name string, state any) {
	t.Helper()
	out := command(t, f.Lab, name, f.programs[name], "status", "--instance", f.Node(name).Instance(),
		"--interval", "0s", "--json")
	must(t, json.Unmarshal([]byte(out), state))
}

func (f *fleet) balancerStatus(t *testing.T, name string) *inspect.Snapshot {
	t.Helper()
	var s inspect.Snapshot
	f.status(t, name, &s)
	return &s
}

func (f *fleet) requireNoDrops(t *testing.T, name string) {
	t.Helper()
	var s datapath.Snapshot
	f.status(t, name, &s)
	for _, r := range s.Reasons {
		if strings.HasPrefix(r.Reason, "drop_") && r.Packets > 0 {
			t.Errorf("%s dropped %d packets: %s", name, r.Packets, r.Reason)
		}
	}
}

// requireUnderstanding fails the test unless all balancers think that all servers are well and get
// reports of their loads, and servers hand connections back to each other.
func (f *fleet) requireUnderstanding(t *testing.T) {
	t.Helper()
	handed := f.handBacks(t)
	eventually(t, func() error {
		if n := f.handBacks(t); n <= handed {
			return fmt.Errorf("servers have handed back %d connections, and then no more", handed)
		}
		return nil
	})
	for _, name := range nodes(f.Lab, lab.RoleBalancer) {
		must(t, f.requireWell(t, name))
		before := f.reports(t, name)
		eventually(t, func() error {
			for of, n := range f.reports(t, name) {
				if n <= before[of] {
					return fmt.Errorf("%s gets no reports of %s", name, of)
				}
			}
			return nil
		})
	}
}

// handBacks returns how many offered connections servers have handed back to servers with less
// load.
func (f *fleet) handBacks(t *testing.T) (n uint64) {
	t.Helper()
	for _, name := range nodes(f.Lab, lab.RoleServer) {
		var s agent.Snapshot
		f.status(t, name, &s)
		for _, service := range s.Services {
			if service.Accept != nil {
				n += service.Accept.Offers["returned"]
			}
		}
	}
	return n
}

// requireWell returns an error unless a balancer thinks that all servers are well.
func (f *fleet) requireWell(t *testing.T, balancer string) error {
	t.Helper()
	for _, service := range f.balancerStatus(t, balancer).Services {
		for _, s := range service.Servers {
			if s.Condition != inspect.ServerUnchecked || len(s.Causes) > 0 || s.NextHop == nil {
				return fmt.Errorf("%s: %s/%s is %s %v", balancer, service.Name, s.Name, s.Condition, s.Causes)
			}
		}
	}
	return nil
}

// reports returns how many load reports a balancer has taken, by service and server. It fails the
// test if the balancer does not understand some.
func (f *fleet) reports(t *testing.T, balancer string) map[string]uint64 {
	t.Helper()
	taken := map[string]uint64{}
	for _, service := range f.balancerStatus(t, balancer).Services {
		for _, s := range service.Servers {
			if s.Hunt == nil || s.Hunt.Reports == nil {
				continue
			}
			counts := s.Hunt.Reports.Counts
			taken[service.Name+"/"+s.Name] = counts["taken"] + counts["relayed"]
			if counts["unsynchronised"]+counts["unknown_load"] > 0 {
				t.Errorf("%s: reports of %s/%s: %v", balancer, service.Name, s.Name, counts)
			}
		}
	}
	return taken
}

// requireCalls makes servers suspect to a balancer, by SYNs that no server answers. The balancer
// calls them. They answer, so all stay well.
func (f *fleet) requireCalls(t *testing.T, balancer string) {
	t.Helper()
	must(t, f.SetNextHops(balancer))
	hunts := slices.DeleteFunc(f.tcp(), func(s lab.Service) bool { return s.Placement != desired.PlacementHunt })
	sendBrokenSYNs(t, f.Lab, 6*time.Second, hunts...)
	must(t, f.requireWell(t, balancer))
	must(t, f.SetNextHops(nodes(f.Lab, lab.RoleBalancer)...))
	f.requireNoLoss(t, "servers of the earlier build are called")
}

// talk is a flow of UDP.
type talk struct {
	service lab.Service
	conn    net.Conn
	server  string
	err     error // the first failure
}

func startTalks(t *testing.T, l *lab.Lab, s lab.Service, n int) []*talk {
	t.Helper()
	all := make([]*talk, n)
	for i := range all {
		conn, err := l.Node("client").Dial(t.Context(), "udp", s.Address().String())
		must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		all[i] = &talk{service: s, conn: conn}
		all[i].server, err = exchange(conn, []byte("hello"))
		must(t, err)
	}
	return all
}

// goOn sends a datagram, unless the flow has failed.
func (f *talk) goOn() {
	if f.err != nil {
		return
	}
	server, err := exchange(f.conn, []byte("hello again"))
	if err == nil && server != f.server {
		err = fmt.Errorf("was at %s, is at %s", f.server, server)
	}
	f.err = err
}
