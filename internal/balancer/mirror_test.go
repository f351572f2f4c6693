// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"context"
	"encoding/binary"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
)

// withoutSwitch names the packet tests of persistence stateless whose services a switch cannot
// balance, and says why. All other packet tests run on the software switch too, if it is installed:
// see mirror.
var withoutSwitch = map[string]string{
	"TestDryRunChangesNothing":                        noProducts,
	"TestMisleadingCookiesOfChangedColumns":           noProducts,
	"TestPacketsThatCannotBeReturned":                 noProducts,
	"TestHintsFollowReference":                        noProducts,
	"TestFormerFlowsOutliveReloads":                   noFlows,
	"TestForgedLives/observed":                        noLoads,
	"TestICMPErrorsAreNotObserved":                    noLoads,
	"TestNeededFeaturesSuffice/infer,_row,_stateless": noLoads,
	"TestNeededFeaturesSuffice/hash,_multilinear":     noProducts,
	"TestNeededFeaturesSuffice/hunt,_multilinear":     noProducts,
	"TestForgottenFlowWithSignatureZero":              noFlows,
	"TestAffinityFollowsReference/hash,_stateless":    noProducts,
	"TestAffinityFollowsReference/hunt,_stateless":    noProducts,
}

const (
	noLoads    = "a switch does not observe flows, so it cannot infer the loads of servers"
	noProducts = "a switch cannot compute the default bucket hash, which multiplies"
	noFlows    = "the service may have flows in the flow table, so the switch does not get it"
)

// mirror is a switch in front of a fixture. It has the tables of the fixture's data path, and gets
// the same frames. It must send each frame as the data path does, byte for byte, or pass it to the
// host unchanged, and count it under the right reason.
//
// Every fixture that has services for a switch has a mirror. Only the outer flow label of srv6-encap
// differs between both data paths.
type mirror struct {
	*fixture
	sw         *switchtest.Switch
	controller *p4switch.Switch
	from       *offload                    // from which the switch's tables follow
	balances   map[string]bool             // the services in these tables
	servers    map[uint16]*p4switch.Server // all that it has had, by slot
	// counted are the switch's counters of reasons, and forwarded counts frames by slot.
	counted   map[string]datapath.ReasonCount
	forwarded map[uint16]uint64
	seen      map[string]int // packets by the reason of the switch
	last      struct {       // what the switch did with the last frame
		reason string
		frame  []byte
	}
}

// fitsSwitch tells whether a switch can decide as the fixture's data path does now, for one service
// at least.
func (f *fixture) fitsSwitch() bool {
	if f.inside || f.moving {
		return false
	}
	services, _ := f.offloaded()
	return len(services) > 0
}

// runSwitch sends a frame into the mirror, for which the data path has had an outcome.
func (f *fixture) runSwitch(frame []byte, o outcome) {
	f.t.Helper()
	if f.coverage.mirrored && !switchtest.IsInstalled() || !f.fitsSwitch() {
		return
	}
	f.coverage.mirrored = true
	if !switchtest.IsInstalled() || isTagOnly(frame) {
		return
	}
	f.openMirror()
	f.mirror.follow()
	f.mirror.compare(frame, o)
}

// openMirror starts the switch, unless it runs already.
func (f *fixture) openMirror() {
	f.t.Helper()
	if f.mirror == nil {
		f.mirror = newMirror(f)
	}
}

// isTagOnly tells whether a frame is so short behind its VLAN tag that Linux drops it before a
// socket or the switch gets it (skb_vlan_untag).
func isTagOnly(frame []byte) bool {
	ethertype := binary.BigEndian.Uint16(frame[12:])
	return (ethertype == 0x8100 || ethertype == 0x88a8) && len(frame) < ethernetLength+6
}

func newMirror(f *fixture) *mirror {
	f.t.Helper()
	m := &mirror{
		fixture: f, sw: switchtest.Start(f.opener), from: newOffload(&desired.Switch{}),
		servers: map[uint16]*p4switch.Server{}, forwarded: map[uint16]uint64{}, seen: map[string]int{},
	}
	var err error
	m.controller, err = p4switch.Open(f.opener.Context(), m.sw.Client)
	f.must(err)
	f.opener.Cleanup(m.checkServers)
	return m
}

// follow writes the tables of the data path into the switch, if they have changed.
func (m *mirror) follow() {
	m.t.Helper()
	m.withSwitch(m.from, func() {
		hash := m.hashOfContent()
		if hash == m.from.told {
			return
		}
		content, err := m.Balancer.content()
		m.must(err)
		m.must(m.controller.Sync(m.t.Context(), content))
		m.from.told, m.balances = hash, map[string]bool{}
		for _, name := range servicesOf(content) {
			m.balances[name] = true
		}
		for _, server := range content.Servers {
			m.servers[server.Slot] = server
		}
	})
}

// withSwitch calls a function, during which the balancer has a switch. Tests change and apply
// configurations without a switch.
func (f *fixture) withSwitch(o *offload, do func()) {
	cfg, before := f.cfg, f.offload
	defer func() { f.cfg, f.offload = cfg, before }()
	f.cfg, f.offload = copyOf(cfg), o
	f.cfg.Node.Switch = &desired.Switch{NetworkPort: switchtest.Network, HostPort: switchtest.Host}
	if f.own[0].Index == 0 { // also after a restart
		f.own[0] = nexthop.Link{Index: f.ifindex["out"], MAC: ownMAC}
	}
	do()
}

// compare sends a frame into the switch, and checks what leaves, and what is counted.
func (m *mirror) compare(frame []byte, o outcome) {
	m.t.Helper()
	wantPort, want, reasons := m.expected(frame, o)
	port, got := m.sw.Exchange(m.t, switchtest.Network, frame)
	counted := m.newCounts()
	if port != wantPort || !bytes.Equal(got, want) {
		m.t.Fatalf("the data path: %v\nthe switch sends %x by port %d,\nnot             %x by port %d (%v)\nof the frame    %x",
			o.Reasons, got, port, want, wantPort, reasons, frame)
	}
	if len(counted) != 1 || !slices.Contains(reasons, counted[0].Reason) ||
		counted[0].Packets != 1 || counted[0].Bytes != uint64(len(frame)) {
		m.t.Fatalf("the data path: %v\nthe switch counts %v, not one packet of %v\nof the frame %x", o.Reasons, counted, reasons, frame)
	}
	m.seen[counted[0].Reason]++
	m.last.reason, m.last.frame = counted[0].Reason, got
}

// newCounts returns how the switch's counters of reasons have changed since the last call.
func (m *mirror) newCounts() (changes []datapath.ReasonCount) {
	m.t.Helper()
	counts, err := m.sw.Reasons(m.t.Context())
	m.must(err)
	counted := map[string]datapath.ReasonCount{}
	for _, c := range counts {
		before := m.counted[c.Reason]
		counted[c.Reason] = c
		if c != before && c.Packets > 0 {
			c.Packets, c.Bytes = c.Packets-before.Packets, c.Bytes-before.Bytes
			changes = append(changes, c)
		}
	}
	m.counted = counted
	return changes
}

// checkServers compares the counters of servers with all packets that the switch has forwarded.
func (m *mirror) checkServers() {
	got := map[uint16]uint64{}
	servers := slices.Collect(maps.Values(m.servers))
	// The context of the test has ended.
	m.must(m.sw.Servers(context.Background(), servers, func(server *p4switch.Server, packets, _ uint64) {
		if packets > 0 {
			got[server.Slot] = packets
		}
	}))
	if !m.opener.Failed() && !maps.Equal(got, m.forwarded) {
		m.opener.Errorf("the switch counts %v packets by slot, and has forwarded %v", got, m.forwarded)
	}
	m.opener.Logf("the switch has counted %v", m.seen)
}

// expected returns what the switch must do with a frame for which the data path has had an outcome:
// the port by which the frame leaves, the frame, and the reason. There are two reasons if the
// outcome does not tell whether the switch reaches the server.
func (m *mirror) expected(frame []byte, o outcome) (port int, out []byte, reasons []string) {
	m.t.Helper()
	p, fault := parse(frame)
	if reason := unbalanced(frame, p, fault); reason != "" {
		return switchtest.Host, frame, []string{reason}
	}
	svc, reason := m.classify(p.flow), reasonOf(o)
	switch {
	case svc == nil || !m.balances[svc.Name]:
		reasons = []string{"pass_no_service"}
	case svc.QUIC != nil && !namesServer(p, svc):
		reasons = []string{"pass_no_server_id"}
	case m.services.hasHints && lacksCookie(p, svc):
		reasons = []string{"pass_no_cookie"}
	case isForward(reason) && !m.leaves(o):
		reasons = []string{"pass_no_server"}
	case isForward(reason) && p.opens() && m.isShortened(p, svc):
		reasons = []string{"pass_too_big"}
	case isForward(reason):
		m.forwarded[uint16(m.slot(svc.Name, strings.TrimPrefix(serverOf(o), svc.Name+"/")))]++
		return switchtest.Network, m.withSwitchLabel(o.Frame, p, svc), []string{reason}
	case strings.HasSuffix(reason, "_hop_limit"):
		reasons = []string{"pass_hop_limit", "pass_no_server"}
	case strings.HasSuffix(reason, "_too_big"):
		reasons = []string{"pass_too_big", "pass_no_server"}
	default:
		reasons = []string{"pass_no_server"}
	}
	return switchtest.Host, frame, reasons
}

// unbalanced returns the reason for which the switch passes a frame to the host before it knows the
// service. It is empty if there is none. The fault is that of the data path.
func unbalanced(frame []byte, p parsed, fault string) string {
	layer3 := frame[ethernetLength:]
	switch {
	case fault == "pass_not_for_host" || frame[6]&1 != 0:
		return "pass_not_for_host"
	case strings.HasPrefix(fault, "pass_"): // also if there is not enough of an IP header
		return "pass_not_ip"
	case fault == "drop_ip_header":
		return "pass_malformed"
	}
	isIPv4 := layer3[0]>>4 == 4
	protocol, header := layer3[6], 40
	if isIPv4 {
		protocol, header = layer3[9], 4*int(layer3[0]&0xf)
	}
	switch {
	case isIPv4 && p.piece != nil:
		return "pass_fragment"
	case protocol == 17:
		return unbalancedUDP(layer3[header:], p)
	case protocol != 6:
		return "pass_protocol"
	case fault != "":
		return "pass_malformed"
	case p.flags&packet.SYN != 0 && p.ends():
		return "pass_flags"
	}
	return ""
}

// unbalancedUDP is unbalanced for a datagram, which is given with all bytes up to the end of the
// frame. The switch looks only at datagrams that have room for a packet of QUIC.
func unbalancedUDP(transport []byte, p parsed) string {
	const header, quic = 8, 17
	switch {
	case len(transport) < header:
		return "pass_protocol"
	case p.datagram == nil:
		return "pass_malformed"
	case len(p.datagram) < quic:
		return "pass_protocol"
	}
	return ""
}

// namesServer tells whether a datagram has QUIC with a short header and an ID of a server.
func namesServer(p parsed, svc *desired.Service) bool {
	return p.datagram[0]&0x80 == 0 && serverNamed(svc, p.datagram[1:]) != nil
}

// lacksCookie tells whether a packet has no cookie, or is a SYN whose later packets will have none.
func lacksCookie(p parsed, svc *desired.Service) bool {
	if svc.QUIC != nil {
		return false
	}
	if p.opens() {
		return svc.Candidates > 1 && timestampsIn(p.options) == nil
	}
	_, ok := column(p, svc)
	return !ok
}

// leaves tells whether a packet leaves by the interface of the switch's host. The switch reaches no
// server behind another interface.
func (m *mirror) leaves(o outcome) bool { return packet.MAC(o.Frame[6:]) == m.macs[m.ownLink()] }

// isShortened tells whether a SYN that the data path forwards is too long for an offer to all
// candidates. The data path offers it to fewer ones, and the switch passes it to the host.
func (m *mirror) isShortened(p parsed, svc *desired.Service) bool {
	const longestHeaders = 40 + 8 + 10*16
	mtu := links[m.ownLink()]
	if int(p.length)+longestHeaders <= mtu || !svc.ServersDecide() || lacksCookie(p, svc) {
		return false
	}
	taking, reached := 0, 0
	for _, name := range m.row(p.flow, svc.Name) {
		slot := m.slot(svc.Name, name)
		if m.plane.Servers.TakesFlows(slot) {
			taking++
		}
		if m.plane.Servers.HasNextHop(slot) && m.plane.Servers.Flags(slot)&dataplane.FlagUnreachable == 0 {
			reached++
		}
	}
	if taking == 0 {
		taking = reached
	}
	return int(p.length)+overheadOf(svc.Encapsulation, taking, true) > mtu
}

func (m *mirror) ownLink() string {
	for name, index := range m.ifindex {
		if index == m.own[0].Index {
			return name
		}
	}
	m.t.Fatalf("no link has the index %d", m.own[0].Index)
	return ""
}

// withSwitchLabel returns a frame of the data path as the switch sends it: the outer flow label of
// srv6-encap is in the lowest bits of the CRC.
func (m *mirror) withSwitchLabel(frame []byte, p parsed, svc *desired.Service) []byte {
	if svc.Encapsulation != desired.SRv6Encap {
		return frame
	}
	frame = slices.Clone(frame)
	crc := uint32(p.flow.Bucket(desired.BucketHashCRC32, &m.identity.BucketKeys, 1<<32))
	first := binary.BigEndian.Uint32(frame[ethernetLength:])
	binary.BigEndian.PutUint32(frame[ethernetLength:], first&^0xfffff|crc&0xfffff)
	return frame
}

// coverage tells what the frames of a test have reached.
type coverage struct {
	stateless bool // a data path with a service of persistence stateless
	mirrored  bool // a switch, or one if it were installed
}

// coverages has the coverage of each test that opens fixtures, by name.
var coverages sync.Map

func coverageOf(t testing.TB) *coverage {
	c, _ := coverages.LoadOrStore(t.Name(), &coverage{})
	return c.(*coverage)
}

// covers notes that a frame reaches the data path.
func (f *fixture) covers() {
	if f.coverage.stateless {
		return
	}
	for _, svc := range f.services.byName {
		if svc.Persistence == desired.PersistenceStateless {
			f.coverage.stateless = true
		}
	}
}

// checkCoverage fails a test of persistence stateless that does not reach a switch, unless
// withoutSwitch says why.
func (f *fixture) checkCoverage() {
	name := f.opener.Name()
	top, _, _ := strings.Cut(name, "/")
	_, isListed := withoutSwitch[name]
	if _, ok := withoutSwitch[top]; ok {
		isListed = true
	}
	_, isFuzzer := f.opener.(*testing.F) // the frames that it gets depend on its corpus
	switch c := f.coverage; {
	case isFuzzer || f.opener.Failed() || f.opener.Skipped():
	case c.stateless && !c.mirrored && !isListed:
		f.opener.Errorf("no frame reaches a switch: use bucket-hash crc-32, or add %s to withoutSwitch with the reason", name)
	case c.mirrored && isListed:
		f.opener.Errorf("frames of %s reach a switch: remove it from withoutSwitch", name)
	}
}

// Each entry of withoutSwitch belongs to a test, and has a reason.
func TestWithoutSwitchNamesTests(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("files %v, %v", files, err)
	}
	tests := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile(`(?m)^func (Test\w+)\(t `).FindAllSubmatch(text, -1) {
			tests[string(match[1])] = true
		}
	}
	for name, why := range withoutSwitch {
		if top, _, _ := strings.Cut(name, "/"); !tests[top] || why == "" {
			t.Errorf("%s: %q", name, why)
		}
	}
}
