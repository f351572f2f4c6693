// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Affinity makes the connections of a client have the same row of candidates.
type Affinity struct {
	By AffinityBy `yaml:"by"` // default client
	// Scope is what the client's row is the same for. Default service.
	Scope AffinityScope `yaml:"scope"`
	// PrefixIPv4 and PrefixIPv6 are how many bits of its address identify a client. Defaults 32 and
	// 128. PrefixIPv6 is a multiple of 4.
	PrefixIPv4 int `yaml:"prefix-ipv4" range:"8 to 32"`
	PrefixIPv6 int `yaml:"prefix-ipv6" range:"16 to 128"`
}

// AffinityBy names the part of a connection that selects its row.
type AffinityBy string

// AffinityScope names the services that share the row of a client.
type AffinityScope string

// The values that Affinity may name.
const (
	AffinityNone   AffinityBy = "none"   // the whole five-tuple
	AffinityClient AffinityBy = "client" // the client's address or prefix

	ScopeService AffinityScope = "service" // each service has another row for a client
	ScopeVIP     AffinityScope = "vip"     // all services of the VIP with this scope have the same one
)

// ipv6PrefixStep is what the length of an IPv6 prefix is a multiple of.
const ipv6PrefixStep = 4

// ClientAffinity is which part of a flow to a service selects its row.
type ClientAffinity struct {
	// Prefix is how many bits of the client's address count. 0: the whole flow counts.
	Prefix int `json:"prefix"`
	// Shared tells whether the port and the protocol of the VIP do not count.
	Shared bool `json:"shared"`
}

// ClientAffinity returns which part of the service's flows selects their rows. A service of several
// ports has one row for a client, not one for each port. So its rows are those of scope vip.
func (s *Service) ClientAffinity() ClientAffinity {
	if s.Affinity == nil || s.Affinity.By != AffinityClient {
		return ClientAffinity{}
	}
	a := ClientAffinity{
		Prefix: s.Affinity.PrefixIPv6,
		Shared: s.Affinity.Scope == ScopeVIP || s.Port == AllPorts || len(s.AllPorts()) > 1,
	}
	if s.VIP.Is4() {
		a.Prefix = s.Affinity.PrefixIPv4
	}
	return a
}

// IsWanted tells whether only a part of the flow selects its row.
func (a ClientAffinity) IsWanted() bool { return a.Prefix > 0 }

// ClientOf returns the prefix of a client that selects its row. It is not valid without affinity.
func (a ClientAffinity) ClientOf(client netip.Addr) netip.Prefix {
	if !a.IsWanted() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(client, a.Prefix).Masked()
}

// defaultAffinity sets the fields of an affinity, if there is one.
func (given Given) defaultAffinity(a *Affinity, path string) {
	if a == nil {
		return
	}
	setDefault(given, fieldpath.Child(path, "by"), &a.By, AffinityClient)
	setDefault(given, fieldpath.Child(path, "scope"), &a.Scope, ScopeService)
	setDefault(given, fieldpath.Child(path, "prefix-ipv4"), &a.PrefixIPv4, 32)
	setDefault(given, fieldpath.Child(path, "prefix-ipv6"), &a.PrefixIPv6, 128)
}

// checkAffinity checks the affinity of a service. Placement has to choose among the servers of the
// row that the client selects.
func (r *rules) checkAffinity(path string, s *Service) {
	a := s.Affinity
	if a == nil {
		return
	}
	checkKnown(r, fieldpath.Child(path, "by"), a.By, AffinityClient, AffinityNone)
	checkKnown(r, fieldpath.Child(path, "scope"), a.Scope, ScopeService, ScopeVIP)
	if a.PrefixIPv6%ipv6PrefixStep != 0 {
		r.failf(fieldpath.Child(path, "prefix-ipv6"), "must be a multiple of %d", ipv6PrefixStep)
	}
	isOther := func(vip netip.Addr) bool { return vip.Is4() != s.VIP.Is4() }
	if a.By == AffinityClient && slices.ContainsFunc(s.VIPs, isOther) {
		r.failf(fieldpath.Child(path, "by"), "must be %s for a service with VIPs of both families: "+
			"write a service for each family", AffinityNone)
	}
	if a.By == AffinityClient && s.BucketHash == BucketHashCRC32 {
		r.failf(fieldpath.Child(path, "by"), "must be %s for bucket-hash %s: switches select buckets by whole flows",
			AffinityNone, s.BucketHash)
	}
	if why := s.WhyNoAffinity(); a.By == AffinityClient && why != "" {
		r.failf(fieldpath.Child(path, "by"), "must be %s for %s: new connections get servers outside their bucket's row",
			AffinityNone, why)
	}
}

// WhyNoAffinity returns the setting by which a new flow can get a server that is not in the row of
// its bucket, such as "selection random". It is empty if all flows get servers of their row, as long
// as these take new flows.
func (s *Service) WhyNoAffinity() string {
	switch method := s.Placement.Method(); {
	case method.ServersDecide && s.Selection.Method().NotInRow != "":
		return fmt.Sprintf("selection %s", s.Selection)
	case method.TakesTurns():
		return fmt.Sprintf("placement %s", s.Placement)
	case method.Infers() && s.Infer != nil && s.Infer.Among != AmongCandidates:
		return fmt.Sprintf("infer.among %s", s.Infer.Among)
	}
	return ""
}
