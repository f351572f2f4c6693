package lab

import (
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/config"
)

// Topology describes a lab. Everything that it does not say, such as the addresses of links, follows
// from it by the rules in plan.go.
type Topology struct {
	// Name tells labs on one machine apart: 1 to 12 lower-case letters and digits.
	Name      string `yaml:"name"`
	Balancers int    `yaml:"balancers"` // 1 to 16
	Servers   int    `yaml:"servers"`   // 1 to 128
	MTU       MTU    `yaml:"mtu"`
	// Bare leaves out the balancers' and agents' daemons: the network, the servers' applications and
	// nothing that connects VIPs with them.
	Bare     bool      `yaml:"bare"`
	Services []Service `yaml:"services"`
}

// MTU holds the sizes in bytes of the largest packets.
type MTU struct {
	Client int `yaml:"client"` // between client and edge router: 1280 to 65535
	Fabric int `yaml:"fabric"` // among edge router, balancers and servers: 1280 to MaxFabricMTU
}

// MaxFabricMTU is the largest MTU with which veth runs XDP natively: a packet, its headroom and the
// kernel's skb_shared_info have to fit a page.
const MaxFabricMTU = 3498

// Service is a service as the client sees it. All servers take part in it.
type Service struct {
	Name          string               `yaml:"name"`
	VIP           netip.Addr           `yaml:"vip"`
	Port          config.Port          `yaml:"port"`
	Protocol      config.Protocol      `yaml:"protocol"`
	Encapsulation config.Encapsulation `yaml:"encapsulation"`
}

// Address is the address and port that clients connect to.
func (s Service) Address() netip.AddrPort { return netip.AddrPortFrom(s.VIP, uint16(s.Port)) }

//go:embed default.yaml
var defaultTopology []byte

// DefaultTopology returns the built-in topology.
func DefaultTopology() Topology {
	var t Topology
	if err := yaml.Load(defaultTopology, &t, yaml.WithKnownFields()); err != nil {
		panic(fmt.Sprintf("lab: the built-in topology: %v", err))
	}
	return t
}

// ParseTopology reads a topology in YAML. Fields that it does not name are those of the built-in
// topology. It refuses unknown fields and everything that Validate does.
func ParseTopology(text []byte) (Topology, error) {
	t := DefaultTopology()
	// The decoder may write into the elements of a slice that it finds: a list in the text replaces
	// the default's as a whole.
	defaults := t.Services
	t.Services = nil
	if err := yaml.Load(text, &t, yaml.WithKnownFields()); err != nil {
		return Topology{}, err
	}
	if t.Services == nil {
		t.Services = defaults
	}
	return t, t.Validate()
}

// LoadTopology reads the topology in a file.
func LoadTopology(path string) (Topology, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Topology{}, fmt.Errorf("topology: %w", err)
	}
	t, err := ParseTopology(text)
	if err != nil {
		return Topology{}, fmt.Errorf("topology %s: %w", path, err)
	}
	return t, nil
}

// A lab's name becomes part of the names of namespaces and of pins. Without hyphens the lab of a
// namespace can be told from its name.
var labName = regexp.MustCompile(`^[a-z0-9]{1,12}$`)

// ValidateName returns an error unless name can be a lab's.
func ValidateName(name string) error {
	if !labName.MatchString(name) {
		return fmt.Errorf("name %q: must be 1 to 12 lower-case letters and digits", name)
	}
	return nil
}

// Validate returns every problem of the topology, each with the field's path and its value.
func (t Topology) Validate() error {
	errs := []error{ValidateName(t.Name)}
	inRange := func(path string, value, low, high int) {
		if value < low || value > high {
			errs = append(errs, fmt.Errorf("%s: %d is not in %d to %d", path, value, low, high))
		}
	}
	inRange("balancers", t.Balancers, 1, maxBalancers)
	inRange("servers", t.Servers, 1, maxServers)
	inRange("mtu.client", t.MTU.Client, 1280, 65535)
	inRange("mtu.fabric", t.MTU.Fabric, 1280, MaxFabricMTU)
	for i, s := range t.Services {
		path := fmt.Sprintf("services[%d]", i)
		errs = append(errs, s.validate(path))
		for j, other := range t.Services[:i] {
			if s.Name == other.Name {
				errs = append(errs, fmt.Errorf("%s.name: %q is the name of services[%d] too", path, s.Name, j))
			}
			if s.Address() == other.Address() && s.Protocol == other.Protocol {
				errs = append(errs, fmt.Errorf("%s: services[%d] has %s %s too", path, j, s.Protocol, s.Address()))
			}
		}
	}
	return errors.Join(errs...)
}

func (s Service) validate(path string) error {
	var errs []error
	fail := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(path+format, args...))
	}
	if s.Name == "" {
		fail(".name: is missing")
	}
	if !s.VIP.IsValid() || s.VIP.Is4In6() || s.VIP.Zone() != "" || !s.VIP.IsGlobalUnicast() {
		fail(".vip: %q is not a unicast address", s.VIP)
	}
	if reserved(s.VIP) {
		fail(".vip: %s is in a prefix of the lab's own links and locators", s.VIP)
	}
	if s.Port == config.AllPorts {
		fail(".port: is missing: the servers' applications need to know where to listen")
	}
	if s.Protocol != config.TCP && s.Protocol != config.UDP {
		fail(".protocol: %q is neither tcp nor udp", s.Protocol)
	}
	known := []config.Encapsulation{config.SRv6Insert, config.SRv6Encap, config.GRE, config.IPIP}
	if !slices.Contains(known, s.Encapsulation) {
		fail(".encapsulation: %q is none of %v", s.Encapsulation, known)
	}
	if s.Encapsulation == config.SRv6Insert && s.VIP.Is4() {
		fail(".encapsulation: srv6-insert cannot carry the IPv4 VIP %s", s.VIP)
	}
	return errors.Join(errs...)
}

// ports returns the distinct ports of the services of a protocol, in ascending order.
func (t Topology) ports(protocol config.Protocol) []uint16 {
	var ports []uint16
	for _, s := range t.Services {
		if s.Protocol == protocol {
			ports = append(ports, uint16(s.Port))
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// vips returns the distinct VIPs in the order of the services.
func (t Topology) vips() []netip.Addr {
	var vips []netip.Addr
	for _, s := range t.Services {
		if !slices.Contains(vips, s.VIP) {
			vips = append(vips, s.VIP)
		}
	}
	return vips
}
