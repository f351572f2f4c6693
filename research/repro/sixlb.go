// SPDX-License-Identifier: Apache-2.0

package repro

// sixLBFigures are the figures of "6LB: Scalable and Application-Aware Load Balancing with Segment
// Routing". Its figures 1 to 4 are drawings, figures 11c and 13 need the data path, and figure 12
// needs a trace and a database.
var sixLBFigures = []Figure{
	{"6lb-II-D", "Failures of a host and of an application", "6LB, section II-D", sectionIID},
	{"6lb-5", "Protocol overhead of steering mechanisms", "6LB, section II-C", figure5},
	{"6lb-6", "Example of algorithm 3, before and after a removal", "6LB, section III-B", figure6},
	{"6lb-7", "Resiliency of consistent hashing to removals of servers", "6LB, section III-B", figure7},
	{"6lb-III-B3", "Steps of algorithm 3, independent tables", "6LB, section III-B3", sectionIIIB3},
	{"6lb-8a", "Model: expected response time", "6LB, section V-B, equation (6)", figure8a},
	{"6lb-8b", "Model: fairness index", "6LB, section V-D", figure8b},
	{"6lb-8c", "Model: 90th percentile of response times", "6LB, section V-F, equation (10)", figure8c},
	{"6lb-8d", "Model: expected response time with forwarding delay", "6LB, section V-C, equation (7)", figure8d},
	{"6lb-8e", "Model: distribution of response times", "6LB, section V-F, equation (9)", figure8e},
	{"6lb-8f", "Model: reduction of the number of servers", "6LB, section V-G, equation (11)", figure8f},
	{"6lb-9", "Model: probability of wrongful rejection", "6LB, section V-E, equation (8)", figure9},
	{"6lb-10a", "Mean response time by load", "6LB, section VI-B2", figure10a},
	{"6lb-10b", "Load of the servers over time, heavy load", "6LB, section VI-B2", figure10b},
	{"6lb-10c", "Distribution of response times, light and heavy load", "6LB, section VI-B2", figure10c},
	{"6lb-11a", "Servers needed for a mean response time", "6LB, section VI-B3", figure11a},
	{"6lb-11b", "Influence of the size of the consistent-hash table", "6LB, section VI-B4", figure11b},
	{"6lb-11d", "Connection resets when servers and the balancer change", "6LB, section VI-B5", figure11d},
	{"6lb-11e", "Mean response time with centralized policies", "6LB, section VI-B7", figure11e},
	{"6lb-11f", "Influence of the variance of service times", "6LB, section VI-B8", figure11f},
}
